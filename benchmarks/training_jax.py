"""Worker of `benchmarks.training`: jaxlab's decoder and train step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training_sizes import Sizes
from benchmarks.workers import peak_memory, serve
from jaxlab.methods import trec
from jaxlab.models.decoder import Decoder
from jaxlab.ops.losses import cross_entropy
from jaxlab.training.optimizers import adamw, decay_matrices, init_state, make_train_step

_PEAK_SIZE = 2048


class _Work:
    """One decoder with compiled functions; `dtype` is bfloat16 on accelerators."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.on_cpu = jax.devices()[0].platform == "cpu"
        self.dtype = jnp.float32 if self.on_cpu else jnp.bfloat16
        self.batches = jnp.asarray(
            np.random.default_rng(0).integers(
                0, sizes.vocab_size, (sizes.steps, sizes.batch_size, sizes.context + 1), np.int32
            )
        )
        model = Decoder(
            vocab_size=sizes.vocab_size,
            width=sizes.width,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            hidden_width=sizes.hidden_width,
            dtype=self.dtype,
        )

        def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
            logits = model.apply({"params": params}, batch[:, :-1])
            return cross_entropy(logits, batch[:, 1:])  # pyright: ignore[reportArgumentType]

        def optimizer(_: Any) -> Any:
            return adamw(
                lambda count: jnp.float32(1e-3),
                0.1,
                clip_norm=1.0,
                weight_decay_mask=decay_matrices,
            )

        step = make_train_step(lambda params, batch, key: loss_fn(params, batch), optimizer)
        self.step = jax.jit(lambda state, batch: step(None, state, batch), donate_argnums=0)
        self.scan = jax.jit(
            lambda state, batches: jax.lax.scan(lambda s, b: step(None, s, b), state, batches),
            donate_argnums=0,
        )
        self.replay = jax.jit(
            lambda params, batches: jax.lax.map(
                lambda batch: trec.reevaluation_loss(loss_fn, params, batch), batches
            )
        )
        key = jax.random.key(0)
        params = nn.unbox(jax.jit(model.init)(key, self.batches[0, :, :-1])["params"])
        self.state = init_state(params, optimizer(None), key)

    def steps(self) -> dict[str, float]:
        """Steps sent one by one, as a Python loop does."""

        def run() -> Any:
            for batch in self.batches:
                self.state, metrics = self.step(self.state, batch)
            return metrics

        return {"seconds": _timed(run) / self.sizes.steps, "memory": peak_memory()}

    def scanned(self) -> dict[str, float]:
        """The same steps in one compiled loop."""

        def run() -> Any:
            self.state, metrics = self.scan(self.state, self.batches)
            return metrics

        return {"seconds": _timed(run) / self.sizes.steps}

    def trec(self) -> dict[str, float]:
        """Re-evaluation of the same batches."""
        seconds = _timed(lambda: self.replay(self.state.params, self.batches))
        return {"seconds": seconds / self.sizes.steps}

    def peak(self) -> dict[str, float]:
        """Rate of a large matrix product, in floating-point operations a second."""
        left, right = (jnp.ones((_PEAK_SIZE, _PEAK_SIZE), self.dtype) for _ in range(2))
        product = jax.jit(lambda a, b: a @ b)
        jax.block_until_ready(product(left, right))
        best = min(_timed(lambda: product(left, right)) for _ in range(3))
        return {"rate": 2 * _PEAK_SIZE**3 / best}


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def main() -> None:
    """Prepares the sizes given on the command line and answers."""
    work = _Work(Sizes(int(sys.argv[1])))
    device = jax.devices()[0]
    facts = {
        "versions": f"jax {jax.__version__}, flax {flax.__version__}",
        "device": device.device_kind,
        "platform": device.platform,
    }
    serve(
        facts,
        {"steps": work.steps, "scanned": work.scanned, "trec": work.trec, "peak": work.peak},
    )


if __name__ == "__main__":
    main()
