"""Weights of a decoder in 8 bits: a quarter of the memory, and faster products on a CPU.

Each output of a matrix has a scale of its own; the matrix holds whole numbers from -127 to 127. In
a product the other side is rounded likewise, each row by its own largest value, so that the sums
are exact in whole numbers. Source: Dettmers et al., "LLM.int8()", section 2.1 (vector-wise
quantisation).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Integer

__all__ = ["Int8Weight", "int8_product", "int8_rows", "quantize_weights", "scale_name"]

_LARGEST = 127
_MOST_INPUTS = np.iinfo(np.int32).max // _LARGEST**2  # whose sum an int32 holds

_INPUT_AXES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("query", "key", "value", "gate", "up", "down", "unembedding"), (0,)),
    "attention_output": (0, 1),
    "embedding": (1,),
}


class Int8Weight(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
      codes: in the shape of the matrix that they stand for.
      scale: factor of each output.
    """

    codes: Int8[Array, "*inputs *outputs"]
    scale: Float32[Array, " *outputs"]


def scale_name(name: str) -> str:
    """Under which name the scales of a parameter lie beside it."""
    return f"{name}_scale"


def quantize_weights(params: Mapping[str, Any]) -> dict[str, Any]:
    """Canonical parameters of a decoder with matrices and token tables in 8 bits.

    They take the place of the others in a model's `apply`, `decode_step`, `prefill`, `generate`,
    `stream` and `beam_search`. Norms, biases and learned positions stay as they are. They have no
    gradient, and lie on one device.

    Args:
      params: canonical, unboxed, floating-point.

    Returns:
      The same names; beside each matrix its float32 scales, as `query_scale` beside `query`.

    Raises:
      ValueError: the parameters are stacked, quantised already, or split over several devices.
    """
    if "layers" in params:
        raise ValueError("params: layers are stacked; allowed: canonical ones, see unstack_layers")
    result: dict[str, Any] = {}
    for name, entry in params.items():
        if isinstance(entry, Mapping):
            result[name] = quantize_weights(entry)
        elif name not in _INPUT_AXES:
            result[name] = entry
        else:
            _check(name, entry)
            result[name], result[scale_name(name)] = _quantized(entry, _INPUT_AXES[name])
    return result


def _check(name: str, weight: Any) -> None:
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(f"params: {name} has type {weight.dtype}; allowed are floating-point ones")
    if isinstance(weight, jax.Array) and len(weight.sharding.device_set) > 1:
        raise ValueError(f"params: {name} lies on several devices; int8 weights need one")


@functools.partial(jax.jit, static_argnums=1)
def _quantized(weight: Float[Array, "*axes"], inputs: tuple[int, ...]) -> Int8Weight:
    weight = weight.astype(jnp.float32)
    scale = _steps(jnp.max(jnp.abs(weight), axis=inputs, keepdims=True))
    codes = jnp.round(weight / scale).astype(jnp.int8)
    return Int8Weight(codes, jnp.squeeze(scale, inputs))


def _steps(largest: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    # NaN stays, so that what it was made of is not taken for a number.
    return jnp.where(largest == 0, jnp.ones_like(largest), largest) / _LARGEST


def int8_rows(
    weight: Int8Weight, tokens: Integer[Array, "*places"]
) -> Float32[Array, "*places width"]:
    """Rows of a table whose outputs are on its first axis; NaN for a row that is not there."""
    codes = jnp.take(weight.codes, tokens, axis=0).astype(jnp.float32)
    return codes * jnp.take(weight.scale, tokens, axis=0)[..., None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def int8_product(
    rows: Float[Array, "rows inputs"], weight: Int8Weight, axis: int = 0
) -> Float[Array, "rows outputs"]:
    """Rows times a matrix, both rounded to 8 bits.

    With steps `a` of a row and `s` of an output, the error is at most
    `a / 2 * sum|weight| + s / 2 * sum|rounded row|`, and rounding in float32.

    Args:
      rows: of any floating-point type.
      weight: a matrix.
      axis: the matrix's axis of inputs.

    Returns:
      Float32, or wider for wider rows.

    Raises:
      ValueError: the product is differentiated, or has too many inputs for a sum in 32 bits.
    """
    count, inputs = rows.shape
    if inputs > _MOST_INPUTS:
        raise ValueError(f"{inputs} inputs of int8 weights: must be at most {_MOST_INPUTS}")
    if count == 1:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))  # XLA's kernel for a vector is many times slower
    rows = rows.astype(np.promote_types(rows.dtype, np.float32))
    steps = _steps(jnp.max(jnp.abs(rows), axis=1, keepdims=True))
    codes = jnp.round(rows / steps).astype(jnp.int8)
    contract = (((1,), (axis,)), ((), ()))
    sums = jax.lax.dot_general(codes, weight.codes, contract, preferred_element_type=jnp.int32)
    product = sums.astype(rows.dtype) * steps * weight.scale.astype(rows.dtype)[None, :]
    return product[:count]


@int8_product.defjvp
def _no_gradient(axis: int, primals: Any, tangents: Any) -> Any:
    raise ValueError("int8 weights: rounding has no gradient; train with floating-point ones")
