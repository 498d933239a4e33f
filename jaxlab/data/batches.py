"""What all sources of batches share: a whole batch for a step, and the orders of rows."""

from __future__ import annotations

import abc
import operator
import sys
from typing import Generic, SupportsIndex, TypeVar

import grain
import numpy as np

__all__ = ["EndlessBatches", "EpochOrder"]

Batch = TypeVar("Batch", covariant=True)


class EndlessBatches(abc.ABC, Generic[Batch]):
    """Random-access source whose element at a step is that step's whole batch.

    A batch is an array or a dict of arrays. It is a function of the source's seed and the step
    alone, so any batch can be replayed, and steps have no end: as in Grain's own endless data
    sets, `len` is `sys.maxsize`. Reading is safe from several threads.
    """

    @abc.abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""

    def __len__(self) -> int:
        """The largest length there is, for steps without end."""
        return sys.maxsize

    def __getitem__(self, index: SupportsIndex) -> Batch:
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


class EpochOrder:
    """Which rows make the batch of a step.

    Each epoch visits the rows in a new random order without replacement; those that do not fill
    a last batch are left out of that epoch. Reading is safe from several threads.

    Attributes:
      num_rows: rows there are.
      batch_size: rows in a batch.
      seed: of the orders.
      steps_per_epoch: batches in a pass over the rows.

    >>> order = EpochOrder(5, batch_size=2, seed=0)
    >>> order.steps_per_epoch, len(set(order.rows(0)) | set(order.rows(1)))
    (2, 4)
    """

    def __init__(self, num_rows: int, *, batch_size: int, seed: int) -> None:
        """Checks the numbers; an order is drawn when it is first needed.

        Args:
          num_rows: at least `batch_size`.
          batch_size: at least 1.
          seed: at least 0.

        Raises:
          ValueError: a number is out of its range.
        """
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("num_rows", num_rows, batch_size),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.steps_per_epoch = num_rows // batch_size
        self._recent: tuple[tuple[int, np.ndarray], ...] = ()

    def rows(self, step: int) -> np.ndarray:
        """The rows of a step: unsigned integers `[batch_size]`."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    def _order(self, epoch: int) -> np.ndarray:
        # One attribute is read and one written, each at once: threads that meet here compute
        # the same order twice at worst. Two epochs are kept for readers on both sides of an end.
        for known, order in self._recent:
            if known == epoch:
                return order
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
        # The order does not depend on the type; the smallest one keeps long epochs affordable.
        order = np.arange(self.num_rows, dtype=np.min_scalar_type(self.num_rows - 1))
        np.random.Generator(bits).shuffle(order)
        self._recent = ((epoch, order), *self._recent[:1])
        return order
