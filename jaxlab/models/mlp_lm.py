"""A language model that sees a fixed window of tokens through one hidden layer.

Source: Bengio et al., "A Neural Probabilistic Language Model", section 2, with a GELU in place
of tanh and without direct connections.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

__all__ = ["MlpLanguageModel"]

_TABLE_AXES = ("vocab", "embed")


class MlpLanguageModel(nn.Module):
    """Predicts the token after a window from the embeddings of its tokens, laid end to end.

    The default sizes give 17,056 parameters.

    Attributes:
      vocab_size: number of tokens.
      window: tokens that the model sees.
      embed_width: width of a token's embedding.
      hidden_width: width of the hidden layer.
      dtype: type of the computation; parameters are float32, and so are the logits.
    """

    vocab_size: int = 32
    window: int = 6
    embed_width: int = 16
    hidden_width: int = 128
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: Integer[Array, "batch window"]) -> Float[Array, "batch vocab"]:
        """Logits of the token that follows each window.

        Args:
          tokens: in `[0, vocab_size)`, oldest first; one at or above `vocab_size` gives NaN.

        Returns:
          Unnormalised log-probabilities, float32.

        Raises:
          ValueError: `tokens` has not `window` columns.
        """
        if tokens.ndim != 2 or tokens.shape[1] != self.window:
            raise ValueError(f"tokens has shape {tokens.shape}: must be [batch, {self.window}]")
        # Unit-variance embeddings and fan-in scaled kernels keep every activation near 1.
        table = (self.vocab_size, self.embed_width)
        embedding = self._parameter("embedding", nn.initializers.normal(1.0), table, _TABLE_AXES)
        vectors = jnp.take(embedding, tokens, axis=0)
        joined = vectors.reshape(tokens.shape[0], self.window * self.embed_width)
        hidden = nn.gelu(self._dense("hidden", joined, self.hidden_width, ("embed", "mlp")))
        # Both axes by name would lie on the mesh axis `model`.
        return self._dense("output", hidden, self.vocab_size, ("mlp", None))

    def _dense(self, name: str, x: Array, width: int, axes: tuple[str, str | None]) -> Array:
        """An affine map with factors in `dtype` and its sum in float32."""
        shape = (x.shape[-1], width)
        kernel = self._parameter(f"{name}_kernel", nn.initializers.lecun_normal(), shape, axes)
        bias = self._parameter(f"{name}_bias", nn.initializers.zeros, shape[1:], axes[1:])
        # NumPy's rule, since JAX's is switched off under strict promotion.
        wide = np.promote_types(self.dtype, np.float32)
        product = jnp.einsum(
            "bi,io->bo",
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            preferred_element_type=wide,
        )
        return product + bias.astype(wide)[None, :]

    def _parameter(
        self, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> Array:
        boxed: Any = nn.with_logical_partitioning(init, axes)
        return self.param(name, boxed, shape, jnp.float32)
