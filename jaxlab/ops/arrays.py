"""Which array module and precision a function computes with, on the host or in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["compute_dtype", "operands", "plain"]


def compute_dtype(dtype: Any) -> Any:
    """The dtype to compute in: float32 for integers and half precision, else unchanged."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32
    return dtype if wide else jnp.dtype(jnp.float32)


def operands(*values: Any, beside: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """The array module to compute with, and the values as its arrays of one dtype.

    Args:
      values: numbers. Where one is a `jax.Array`, all become JAX arrays of the widest of their
        dtypes, at least float32; otherwise NumPy arrays in float64.
      beside: masks, ids and the like that go with them: a `jax.Array` among these makes it JAX as
        well. They are not returned.
    """
    arrays = [x for x in values if isinstance(x, jax.Array)]
    if not arrays and not any(isinstance(x, jax.Array) for x in beside):
        return np, [np.asarray(x, np.float64) for x in values]
    dtypes = [compute_dtype(x.dtype) for x in arrays]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))
    return jnp, [jnp.asarray(x, widest) for x in values]


def plain(xp: Any, value: Any) -> Any:
    """A Python number for a host scalar; anything else as it is."""
    return value.item() if xp is np and np.ndim(value) == 0 else value
