"""Batches of windows from one long row of tokens, addressed by step."""

from __future__ import annotations

import numpy as np

from jaxlab.data.batches import EndlessBatches, EpochOrder
from jaxlab.errors import UserError

__all__ = ["WindowBatches"]


class WindowBatches(EndlessBatches[np.ndarray]):
    """Batches of windows cut from one row of tokens.

    The tokens are cut into windows of `context + 1` that do not overlap (`context` inputs and,
    shifted by one, as many targets). `EpochOrder` says which ones a step reads.

    Attributes:
      batch_size: windows in a batch.
      context: inputs in a window.
      seed: of the orders.
      steps_per_epoch: batches in a pass over the tokens.

    >>> batches = WindowBatches(np.arange(12), batch_size=2, context=2, seed=0)
    >>> batches.steps_per_epoch, batches[5].shape
    (2, (2, 3))
    """

    def __init__(self, tokens: np.ndarray, *, batch_size: int, context: int, seed: int) -> None:
        """Cuts the tokens into windows, without copying them.

        Args:
          tokens: integers of shape `[length]`.
          batch_size: windows in a batch, at least 1.
          context: inputs in a window, at least 1.
          seed: of the orders, at least 0.

        Raises:
          TypeError: the tokens are not integers.
          ValueError: the tokens are not one row, or a number is out of its range.
          UserError: there are too few tokens for one batch.
        """
        if not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(f"tokens have type {tokens.dtype}: must be integers")
        if tokens.ndim != 1:
            raise ValueError(f"tokens have shape {tokens.shape}: must be one row")
        if context < 1:
            raise ValueError(f"context={context}: must be at least 1")
        count = len(tokens) // (context + 1)
        if count < batch_size:
            raise UserError(
                "data",
                f"{len(tokens)} tokens",
                f"too few for one batch: batch_size={batch_size} windows of context={context} "
                f"and one target need {batch_size * (context + 1)} tokens",
            )
        self._order = EpochOrder(count, batch_size=batch_size, seed=seed)
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.steps_per_epoch = self._order.steps_per_epoch
        self._windows = tokens[: count * (context + 1)].reshape(count, context + 1)

    def batch(self, step: int) -> np.ndarray:
        """The batch of a step: int32 `[batch_size, context + 1]`."""
        return self._windows[self._order.rows(step)].astype(np.int32)
