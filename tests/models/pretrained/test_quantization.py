"""The formats against their definitions, one value after another."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlab.models.pretrained.quantization import FORMATS, dequantize

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def half(data: bytes, place: int) -> float:
    return float(np.frombuffer(data, "<f2", 1, place)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibble(data: bytes, i: int) -> int:
    """Value i of 32: the low halves of 16 bytes, then the high ones."""
    return data[i % 16] >> 4 * (i // 16) & 15


def q4_0(b: bytes, i: int) -> float:
    return half(b, 0) * (nibble(b[2:], i) - 8)


def q4_1(b: bytes, i: int) -> float:
    return half(b, 0) * nibble(b[4:], i) + half(b, 2)


def q5_0(b: bytes, i: int) -> float:
    high = int.from_bytes(b[2:6], "little") >> i & 1
    return half(b, 0) * (nibble(b[6:], i) + 16 * high - 16)


def q5_1(b: bytes, i: int) -> float:
    high = int.from_bytes(b[4:8], "little") >> i & 1
    return half(b, 0) * (nibble(b[8:], i) + 16 * high) + half(b, 2)


def q8_0(b: bytes, i: int) -> float:
    return half(b, 0) * signed(b[2 + i])


def iq4_nl(b: bytes, i: int) -> float:
    return half(b, 0) * NONLINEAR[nibble(b[2:], i)]


def two_bits(data: bytes, i: int) -> int:
    """Value i of 256: in each half, four runs of 32 share 32 bytes."""
    return data[i // 128 * 32 + i % 32] >> 2 * (i % 128 // 32) & 3


def q2_k(b: bytes, i: int) -> float:
    scale = b[i // 16]
    return half(b, 80) * (scale & 15) * two_bits(b[16:80], i) - half(b, 82) * (scale >> 4)


def q3_k(b: bytes, i: int) -> float:
    group = i // 16
    low = b[96 + group % 8] >> 4 * (group // 8) & 15
    high = b[104 + group % 4] >> 2 * (group // 4) & 3
    missing = 0 if b[i % 32] >> i // 32 & 1 else 4
    return half(b, 108) * (low + 16 * high - 32) * (two_bits(b[32:96], i) - missing)


def six_bits(s: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) + 16 * (s[j - 4] >> 6), (s[j + 4] >> 4) + 16 * (s[j] >> 6)


def q4_k(b: bytes, i: int) -> float:
    scale, shift = six_bits(b[4:16], i // 32)
    value = b[16 + i // 64 * 32 + i % 32] >> 4 * (i % 64 // 32) & 15
    return half(b, 0) * scale * value - half(b, 2) * shift


def q5_k(b: bytes, i: int) -> float:
    scale, shift = six_bits(b[4:16], i // 32)
    value = b[48 + i // 64 * 32 + i % 32] >> 4 * (i % 64 // 32) & 15
    value += 16 * (b[16 + i % 32] >> i // 32 & 1)
    return half(b, 0) * scale * value - half(b, 2) * shift


def q6_k(b: bytes, i: int) -> float:
    part, place = divmod(i, 128)
    low = b[part * 64 + place % 64] >> 4 * (place // 64) & 15
    high = b[128 + part * 32 + place % 32] >> 2 * (place // 32) & 3
    return half(b, 208) * signed(b[192 + i // 16]) * (low + 16 * high - 32)


REFERENCES = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
}


def random_blocks(name: str, count: int) -> np.ndarray:
    """Bytes of blocks in which everything but the half-precision scales is random."""
    rng = np.random.default_rng(sum(name.encode()))
    layout = FORMATS[name].layout
    blocks = rng.integers(0, 256, count * layout.itemsize, np.uint8).view(layout)
    for scale in {"d", "m"} & set(layout.names or ()):
        blocks[scale] = rng.standard_normal(count)
    return blocks.view(np.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_values_follow_the_definition(name: str):
    values, layout, _ = FORMATS[name]
    data = random_blocks(name, 3)
    expected = [
        REFERENCES[name](data[start : start + layout.itemsize].tobytes(), i)
        for start in range(0, data.size, layout.itemsize)
        for i in range(values)
    ]
    found = dequantize(data, name)
    assert found.dtype == np.float32
    # Products of whole numbers and half-precision scales; float32 rounds the last step or two.
    scale = max(abs(value) for value in expected)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_many_blocks_are_the_same_as_one_after_another(name: str):
    values, layout, _ = FORMATS[name]
    count = 3 * (1 << 16) // values + 5
    data = random_blocks(name, count)
    found = dequantize(data, name).reshape(count, values)
    for index in (0, (1 << 16) // values - 1, (1 << 16) // values, count - 1):
        alone = dequantize(data[index * layout.itemsize : (index + 1) * layout.itemsize], name)
        np.testing.assert_array_equal(found[index], alone)


def test_part_of_a_block_is_refused():
    with pytest.raises(ValueError, match=r"35 bytes of uint8: Q8_0 needs blocks of 34 bytes"):
        dequantize(np.zeros(35, np.uint8), "Q8_0")


@pytest.mark.parametrize(("name", "field"), [("Q4_0", "d"), ("Q4_1", "m"), ("Q4_K", "m")])
def test_infinite_scale_is_refused(name: str, field: str):
    blocks = random_blocks(name, 2).view(FORMATS[name].layout)
    blocks[field][1] = np.inf
    with pytest.raises(ValueError, match="scale that is not finite"):
        dequantize(blocks.view(np.uint8), name)
