"""Training re-evaluation curves: measuring, smoothing and comparing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxlab.methods.trec.arrays import Curves, check_curve, check_lengths, check_varies, split
from jaxlab.ops.arrays import compute_dtype, operands, plain

__all__ = ["bin_curve", "compute_trec", "pearson", "reevaluation_loss", "valley"]


def reevaluation_loss(
    loss_fn: Callable[[PyTree, PyTree], Float[Array, ""]],
    params: PyTree,
    batch: PyTree,
    reference_params: PyTree | None = None,
) -> Float[Array, ""]:
    """The loss of trained weights on one training batch.

    Args:
      loss_fn: `(params, batch) -> scalar` mean loss, in evaluation mode and with training's mask.
      params: the final weights.
      batch: the batch as it was trained on.
      reference_params: weights of a model trained by the same recipe on independent data, whose
        loss on the batch is subtracted. It removes the batch's difficulty, which at small scale
        hides the curve, and leaves what was memorised. None: nothing is subtracted, as in the
        paper.

    Returns:
      The loss [], in the loss function's unit, at least float32.

    Raises:
      ValueError: `loss_fn` does not return a scalar.
    """

    def loss(weights: PyTree) -> Float[Array, ""]:
        value = jnp.asarray(loss_fn(weights, batch))
        if value.shape:
            raise ValueError(f"loss_fn returned shape {value.shape}: it must return a scalar")
        return value.astype(compute_dtype(value.dtype))

    return loss(params) if reference_params is None else loss(params) - loss(reference_params)


def compute_trec(
    loss_fn: Callable[[PyTree, PyTree], Float[Array, ""]],
    params: PyTree,
    batch_fn: Callable[[Int[Array, ""]], PyTree],
    num_steps: int,
    *,
    reference_params: PyTree | None = None,
    chunk: int = 1,
) -> Float[Array, " steps"]:
    """The training re-evaluation curve: the final weights' loss on every training batch.

    The curve is not flat though batches are alike, because the final weights have partly memorised
    the recent ones; their loss on unseen data is the flat line. A low value tells of retention, not
    of generalisation. Where sources differ in difficulty, compare within one or use a reference.

    Args:
      loss_fn: `(params, batch) -> scalar`; see `reevaluation_loss`.
      params: the final weights.
      batch_fn: maps a step's index, int32 from 0, to the batch that training consumed at that
        step. It must be pure and traceable: the replay is only as exact as this function.
      num_steps: steps `T` to replay, at least 1.
      reference_params: see `reevaluation_loss`.
      chunk: steps evaluated at once (by vmap); trades memory for speed, changes no result beyond
        rounding.

    Returns:
      float32 [T] (float64 from a float64 loss).

    Raises:
      ValueError: `num_steps` or `chunk` below 1, or a loss that is no scalar.

    Source: arXiv 2509.25380, definition of the TREC.
    """
    for argument, value in (("num_steps", num_steps), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{argument}={value}: must be at least 1")

    def one_step(index: Int[Array, ""]) -> Float[Array, ""]:
        return reevaluation_loss(loss_fn, params, batch_fn(index), reference_params)

    indices = jnp.arange(num_steps, dtype=jnp.int32)
    return jax.lax.map(one_step, indices, batch_size=None if chunk == 1 else chunk)


def bin_curve(x: Curves, num_bins: int) -> tuple[Any, Any]:
    """Smooths a curve into equal bins of consecutive steps. Host or graph.

    Args:
      x: curve [..., T].
      num_bins: bins `K`, from 1 to `T`; must divide `T`.

    Returns:
      Mean [..., K] and its standard error [..., K]; the latter is 0 in bins of a single step, whose
      spread is unknown.

    Raises:
      ValueError: `num_bins` does not divide the curve's length.

    Example:
      >>> bin_curve([1.0, 3.0, 2.0, 2.0], num_bins=2)
      (array([2., 2.]), array([1., 0.]))
    """
    xp, (values,) = operands(x)
    bins = split(xp, "x", values, num_bins)
    size = bins.shape[-1]
    mean = xp.mean(bins, axis=-1)
    variance = xp.var(bins, axis=-1, ddof=1) if size > 1 else xp.zeros_like(mean)
    return mean, xp.sqrt(variance / size)


def pearson(
    a: Curves,
    b: Curves,
) -> Any:
    """Pearson correlation of curves along their last axis. Host or graph.

    Args:
      a: curves [..., T].
      b: curves [..., T]; leading axes broadcast against those of `a`.

    Returns:
      Correlation [...] in [-1, 1]; on the host a float for two single curves. In the graph, NaN
      for a constant curve.

    Raises:
      ValueError: the lengths differ, or (host) a curve is constant or not finite.
    """
    xp, (x, y) = operands(a, b)
    check_curve("a", x)
    check_curve("b", y)
    check_lengths("a", x, "b", y)
    if xp is np:
        check_varies("a", x)
        check_varies("b", y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    x, y = (xp.broadcast_to(_standardise(xp, curve), shape) for curve in (x, y))
    return plain(xp, xp.clip(xp.sum(x * y, axis=-1), -1.0, 1.0))


def _standardise(xp: Any, curve: Any) -> Any:
    """The curve with mean 0 and norm 1."""
    centred = curve - xp.mean(curve, axis=-1, keepdims=True)
    # Squares of tiny deviations would underflow in float32.
    centred = centred / xp.max(xp.abs(centred), axis=-1, keepdims=True)
    return centred / xp.linalg.norm(centred, axis=-1, keepdims=True)


def valley(
    curve: Curves,
    *,
    num_steps: int | None = None,
) -> Any:
    """Where a curve is lowest, as a training fraction `t / T` in (0, 1]. Host or graph.

    Args:
      curve: [..., T], one value for each step, or [..., K], the means of equal bins.
      num_steps: steps `T` that a binned curve covers; a multiple of `K`. By default each entry is
        one step.

    Returns:
      Fraction [...] of the lowest entry (the first, among equals): of step `t` it is `t / T` with
      `t` from 1, of a bin the mean of its steps' fractions. On the host a float for one curve.

    Raises:
      ValueError: `num_steps` is no multiple of the curve's length.

    Example:
      >>> valley([3.0, 1.0, 2.0, 2.0])
      0.5
      >>> valley([3.0, 1.0, 2.0, 2.0], num_steps=400)  # the mean of 101/400, ..., 200/400
      0.37625
    """
    xp, (values,) = operands(curve)
    check_curve("curve", values)
    length = values.shape[-1]
    steps = length if num_steps is None else num_steps
    if not length or steps < 1 or steps % length:
        raise ValueError(f"num_steps={steps}: must be a multiple of the curve's length {length}")
    size = steps // length
    lowest = xp.argmin(values, axis=-1).astype(values.dtype)
    return plain(xp, (lowest * size + (size + 1) / 2) / steps)
