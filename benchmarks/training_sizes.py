"""The decoder that `benchmarks.training` trains, for both libraries."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sizes", "step_flops"]


class Sizes(NamedTuple):
    """A decoder in the style of Llama, and its batch."""

    width: int
    num_layers: int = 4
    vocab_size: int = 256
    batch_size: int = 8
    context: int = 256
    steps: int = 4

    @property
    def num_heads(self) -> int:
        """Query heads of width 64."""
        return self.width // 64

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads: half as many."""
        return max(1, self.num_heads // 2)

    @property
    def hidden_width(self) -> int:
        """Width of the gated MLP, 8/3 of the width, a multiple of 32."""
        return 32 * -(-8 * self.width // 96)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.context


def step_flops(sizes: Sizes) -> float:
    """Floating-point operations of the matrix products of one training step.

    Forward and twice that backward; attention counts whole squares, which both libraries compute.
    """
    kv_width = 64 * sizes.num_kv_heads
    layer = 2 * sizes.width**2 + 2 * sizes.width * kv_width + 3 * sizes.width * sizes.hidden_width
    weights = sizes.num_layers * layer + sizes.width * sizes.vocab_size
    attention = 2 * sizes.num_layers * sizes.context * sizes.width
    return 3 * 2 * sizes.tokens * (weights + attention)
