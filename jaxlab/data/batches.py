"""What all sources of batches share: a whole batch for a step, for ever."""

from __future__ import annotations

import abc
import operator
import sys

import grain
import numpy as np

__all__ = ["EndlessBatches"]


class EndlessBatches(abc.ABC):
    """Random-access source whose element at a step is that step's whole batch.

    A batch is a function of the source's seed and the step alone, so any batch can be replayed,
    and steps have no end: as in Grain's own endless data sets, `len` is `sys.maxsize`. Reading is
    safe from several threads.
    """

    @abc.abstractmethod
    def batch(self, step: int) -> np.ndarray:
        """The batch of a step, counted from 0."""

    def __len__(self) -> int:
        """The largest length there is, for steps without end."""
        return sys.maxsize

    def __getitem__(self, index: int) -> np.ndarray:
        """`batch` of any whole number.

        Raises:
          IndexError: the step is negative.
        """
        step = operator.index(index)
        if step < 0:
            raise IndexError(f"step={step}: must not be negative")
        return self.batch(step)

    def dataset(self) -> grain.MapDataset:
        """The same batches as a Grain data set, for `.slice`, `.map` and prefetching."""
        return grain.MapDataset.source(self)
