"""The block formats of GGUF files, back to float32.

A quantised tensor is a row of blocks. Each block holds a few bits for every value, and one or two
half-precision numbers that scale and shift them; the K formats scale in two levels: sub-blocks of
16 or 32 values have small whole-number scales of their own.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`), as of GGUF version 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["FORMATS", "PLAIN_TYPES", "TYPE_NAMES", "Format", "dequantize"]

# Values that are decoded at once: what stays in a processor's cache.
_CHUNK = 1 << 16

_Decode = Callable[[np.ndarray, np.ndarray], None]


class Format(NamedTuple):
    """One block format.

    Attributes:
      values: how many values a block holds.
      layout: NumPy type of a block.
      decode: fills float32 `[blocks, values]` from an array of blocks.
    """

    values: int
    layout: np.dtype
    decode: _Decode


def dequantize(data: np.ndarray, name: str) -> np.ndarray:
    """The values of a row of blocks.

    Args:
      data: bytes of whole blocks, uint8 `[bytes]`.
      name: one of `FORMATS`, e.g. `Q4_1`.

    Returns:
      float32 `[values]`.

    Raises:
      ValueError: the bytes are no whole number of blocks, or a scale is not finite.

    >>> block = np.array([0, 0x3C] + [7] * 32, np.uint8)  # a scale of 1, then int8 values
    >>> dequantize(block, "Q8_0")[:3]
    array([7., 7., 7.], dtype=float32)
    """
    values, layout, decode = FORMATS[name]
    if data.dtype != np.uint8 or data.ndim != 1 or data.size % layout.itemsize:
        raise ValueError(
            f"{data.size} bytes of {data.dtype}: {name} needs blocks of {layout.itemsize} bytes"
        )
    blocks = data.view(layout)
    for scale in ("d", "m"):
        if scale in (layout.names or ()) and not np.isfinite(blocks[scale]).all():
            raise ValueError(f"a block of {name} has a scale that is not finite")
    out = np.empty((blocks.size, values), np.float32)
    step = _CHUNK // values
    for start in range(0, blocks.size, step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None]


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Low halves of the bytes `[..., n]` first, then the high ones, into `[..., 2, n]`."""
    np.bitwise_and(packed, 15, out=out[..., 0, :], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., 1, :], casting="unsafe")


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["q"], _column(blocks["d"]), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"], out.reshape(-1, 2, 16))
    out -= 8
    out *= _column(blocks["d"])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"], out.reshape(-1, 2, 16))
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


def _add_fifth_bits(blocks: np.ndarray, out: np.ndarray) -> None:
    out += np.unpackbits(blocks["high"], axis=1, bitorder="little").astype(np.float32) * 16


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"], out.reshape(-1, 2, 16))
    _add_fifth_bits(blocks, out)
    out -= 16
    out *= _column(blocks["d"])


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"], out.reshape(-1, 2, 16))
    _add_fifth_bits(blocks, out)
    out *= _column(blocks["d"])
    out += _column(blocks["m"])


# The values of IQ4_NL, denser near zero.
_NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    index = np.empty((blocks.size, 2, 16), np.uint8)
    _nibbles(blocks["q"], index)
    np.multiply(_NONLINEAR[index.reshape(out.shape)], _column(blocks["d"]), out=out)


_QUARTERS = np.array([0, 2, 4, 6], np.uint8)


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """Bytes `[blocks, 2, 32]` to values in 0..3 `[blocks, 2, 4, 32]`."""
    return (packed[:, :, None, :] >> _QUARTERS[:, None]) & 3


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scale = (blocks["scales"] & 15) * _column(blocks["d"])
    shift = (blocks["scales"] >> 4) * _column(blocks["m"])
    np.multiply(
        _pairs_of_bits(blocks["q"].reshape(-1, 2, 32)).reshape(-1, 16, 16),
        scale[:, :, None],
        out=out.reshape(-1, 16, 16),
    )
    out.reshape(-1, 16, 16)[...] -= shift[:, :, None]


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    packed = blocks["scales"]
    scale = np.empty((blocks.size, 2, 8), np.uint8)
    _nibbles(packed[:, :8], scale)
    scale = scale.reshape(-1, 4, 4) | (packed[:, None, 8:] >> _QUARTERS[:, None] & 3) << 4
    scale = (scale.reshape(-1, 16).astype(np.int8) - 32) * _column(blocks["d"])
    # Bit i of the 32 bytes belongs to the i-th run of 32 values; a cleared one takes off 4.
    high = np.unpackbits(blocks["high"][:, None, :], axis=1, bitorder="little")
    low = _pairs_of_bits(blocks["q"].reshape(-1, 2, 32)).reshape(-1, 8, 32)
    values = low.astype(np.int8) + (high.astype(np.int8) - 1) * 4
    np.multiply(values.reshape(-1, 16, 16), scale[:, :, None], out=out.reshape(-1, 16, 16))


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight shifts in 0..63 from the 12 bytes of Q4_K and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    shifts = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales, shifts


def _scale_runs_of_32(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, shifts = _six_bit_scales(blocks["scales"])
    runs = out.reshape(-1, 8, 32)
    runs *= (scales * _column(blocks["d"]))[:, :, None]
    runs -= (shifts * _column(blocks["m"]))[:, :, None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    _scale_runs_of_32(blocks, out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    high = np.unpackbits(blocks["high"][:, None, :], axis=1, bitorder="little")
    out += high.reshape(out.shape).astype(np.float32) * 16
    _scale_runs_of_32(blocks, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    values = np.empty((blocks.size, 2, 2, 64), np.uint8)
    _nibbles(blocks["q"].reshape(-1, 2, 64), values)
    high = _pairs_of_bits(blocks["high"].reshape(-1, 2, 32)).reshape(-1, 256)
    values = (values.reshape(-1, 256) | high << 4).astype(np.int8) - 32
    scale = blocks["scales"] * _column(blocks["d"])
    np.multiply(values.reshape(-1, 16, 16), scale[:, :, None], out=out.reshape(-1, 16, 16))


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype(list(fields))


_D, _M = ("d", "<f2"), ("m", "<f2")

FORMATS: Mapping[str, Format] = {
    "Q4_0": Format(32, _layout(_D, ("q", "u1", 16)), _q4_0),
    "Q4_1": Format(32, _layout(_D, _M, ("q", "u1", 16)), _q4_1),
    "Q5_0": Format(32, _layout(_D, ("high", "u1", 4), ("q", "u1", 16)), _q5_0),
    "Q5_1": Format(32, _layout(_D, _M, ("high", "u1", 4), ("q", "u1", 16)), _q5_1),
    "Q8_0": Format(32, _layout(_D, ("q", "i1", 32)), _q8_0),
    "Q2_K": Format(256, _layout(("scales", "u1", 16), ("q", "u1", 64), _D, _M), _q2_k),
    "Q3_K": Format(
        256, _layout(("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), _D), _q3_k
    ),
    "Q4_K": Format(256, _layout(_D, _M, ("scales", "u1", 12), ("q", "u1", 128)), _q4_k),
    "Q5_K": Format(
        256,
        _layout(_D, _M, ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)),
        _q5_k,
    ),
    "Q6_K": Format(
        256, _layout(("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D), _q6_k
    ),
    "IQ4_NL": Format(32, _layout(_D, ("q", "u1", 16)), _iq4_nl),
}
"""The formats that can be decoded, by the name that ggml gives them."""

PLAIN_TYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
}
"""The types that are stored as they are."""

TYPE_NAMES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""The number of a type in a file to its name; not all of them can be decoded."""
