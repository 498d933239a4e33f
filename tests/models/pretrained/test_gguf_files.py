from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlab.errors import UserError
from jaxlab.models.pretrained.gguf_files import GgufFile
from tests.models.pretrained.gguf_writer import gguf_bytes, stored, text, write_gguf

ONE = {"x": stored(np.arange(6, dtype=np.float32).reshape(2, 3))}


def refused(path: Path, data: bytes, words: str) -> None:
    path.write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64"])
def test_plain_types_keep_values_and_type(tmp_path: Path, kind: str):
    values = np.arange(-6, 6).reshape(3, 4)
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"x": stored(values, kind)}))
    found = file.read("x")
    assert found.dtype == file.dtype("x")
    assert not found.flags.writeable
    np.testing.assert_array_equal(found.astype(np.float64), values)


def test_quantised_tensor_is_decoded_in_its_shape(tmp_path: Path):
    scales = np.array([0.5, 2.0, -1.0, 0.25], "<f2")
    values = np.arange(128, dtype=np.int8).reshape(4, 32)
    raw = b"".join(s.tobytes() + v.tobytes() for s, v in zip(scales, values, strict=True))
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"x": ("Q8_0", (2, 64), raw)}))
    assert file.dtype("x") == np.float32
    expected = (scales.astype(np.float32)[:, None] * values.astype(np.float32)).reshape(2, 64)
    np.testing.assert_array_equal(file.read("x"), expected)


def test_metadata_of_every_type(tmp_path: Path):
    numbers: dict[str, tuple[int, str, Any]] = {
        "u8": (0, "<B", 200),
        "i8": (1, "<b", -3),
        "u16": (2, "<H", 60000),
        "i16": (3, "<h", -300),
        "i32": (5, "<i", -70000),
        "u64": (10, "<Q", 2**63),
        "i64": (11, "<q", -(2**62)),
        "f64": (12, "<d", 0.1),
    }
    metadata = {key: struct.pack("<I", k) + struct.pack(f, v) for key, (k, f, v) in numbers.items()}
    metadata |= {"flag": True, "count": 7, "rate": 1e-5, "words": ["é", ""], "ids": [3, -1]}
    found = GgufFile(write_gguf(tmp_path / "a.gguf", metadata, ONE)).metadata
    assert {key: found[key] for key in numbers} == {key: v for key, (_, _, v) in numbers.items()}
    assert found["flag"] is True
    assert (found["count"], found["rate"], found["words"]) == (7, 1e-5, ("é", ""))
    np.testing.assert_array_equal(found["ids"], [3, -1])


def test_alignment_is_taken_from_the_metadata(tmp_path: Path):
    path = tmp_path / "a.gguf"
    tensors = {name: stored(np.array([number])) for name, number in (("x", 1.5), ("y", 2.5))}
    path.write_bytes(gguf_bytes({"general.alignment": 4096}, tensors, alignment=4096))
    file = GgufFile(path)
    assert [file.read(name).item() for name in ("x", "y")] == [1.5, 2.5]


def test_unsupported_type_is_named_with_its_tensor_when_read(tmp_path: Path):
    tensors = ONE | {"odd": ("IQ2_XXS", (1, 256), b"\0" * 66)}
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, tensors))
    np.testing.assert_array_equal(file.read("x"), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(UserError, match=r"tensor odd has type IQ2_XXS; supported are F32, .*Q6_K"):
        file.read("odd")


def test_infinite_scale_names_the_tensor(tmp_path: Path):
    raw = np.array(np.inf, "<f2").tobytes() + b"\1" * 32
    file = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"x": ("Q8_0", (32,), raw)}))
    with pytest.raises(UserError, match="tensor x: a block of Q8_0 has a scale"):
        file.read("x")


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


PLAIN = gguf_bytes({"k": "v"}, ONE)


def pack(layout: str, *numbers: int) -> bytes:
    return struct.pack("<" + layout, *numbers)


def key(new: bytes) -> bytes:
    """The file with other bytes for the key `k`."""
    return patched(PLAIN, text("k"), new)


def entry(*numbers: int) -> bytes:
    """The file with another table entry: number of axes, axes, type, offset."""
    return patched(
        PLAIN, text("x") + pack("IQQIQ", 2, 3, 2, 0, 0), text("x") + pack("IQQIQ", *numbers)
    )


def array(*numbers: int) -> bytes:
    """A file with metadata of a type, an element type and a length."""
    return gguf_bytes({"a": pack("IIQ" + "Q" * (len(numbers) - 3), *numbers)}, ONE)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"GG", "magic number at byte 0 takes 4 bytes of 2"),
        (b"PK\3\4" + PLAIN[4:], "does not begin with GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + PLAIN[8:], "big-endian"),
        (b"GGUF" + pack("I", 1) + PLAIN[8:], "GGUF version 1; supported are 2 and 3"),
        (PLAIN[:8] + pack("Q", 2**60) + PLAIN[16:], "announces 1152921504606846976 tensors"),
        (PLAIN[:16] + pack("Q", 2**60) + PLAIN[24:], "announces 1 tensors and 1152"),
        (PLAIN[:-9], "tensor x ends at byte .* is it whole"),
        (PLAIN[:40], "is the file whole"),
        (key(pack("Q", 2**40) + b"k"), "key at byte .* more than 65"),
        (key(pack("Q", 2**15) + b"k"), "key at byte .* that are left"),
        (key(pack("Q", 1) + b"\xff"), "key at byte 32 is not UTF-8"),
        (patched(PLAIN, text("k") + pack("I", 8), text("k") + pack("I", 99)), "unknown type 99"),
        (entry(5, 3, 2, 0, 0), "x has 5 axes"),
        (entry(2, 2**30, 2, 0, 0), "ends at byte"),
        (entry(2, 2**40, 2, 77, 0), "x has an axis of 1099511627776"),
        (entry(2, 0, 2, 0, 0), "is empty"),
        (entry(2, 3, 2, 8, 0), "rows of 3 values"),
        (entry(2, 3, 2, 0, 4), "not aligned to 32"),
        (gguf_bytes({"general.alignment": 48}, ONE), "general.alignment=48: must be a power of"),
        (array(9, 9, 1), "a is an array of the unsupported"),
        (array(9, 8, 2**60), "a announces 1152"),
        (array(9, 12, 2**60), "a at byte .* that are left"),
        (array(9, 8, 1, 2**50), "entry of metadata a at byte"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, data: bytes, words: str):
    refused(tmp_path / "a.gguf", data, words)


def test_names_that_stand_twice_are_refused(tmp_path: Path):
    twice = gguf_bytes({"a": 1, "b": 1}, ONE | {"y": ONE["x"]})
    refused(tmp_path / "a.gguf", twice.replace(text("b"), text("a")), "metadata key a twice")
    refused(tmp_path / "a.gguf", twice.replace(text("y"), text("x")), "tensor x twice")


def test_overlap_is_refused(tmp_path: Path):
    big = stored(np.zeros((4, 8), np.float32))
    data = gguf_bytes({}, {"x": big, "y": big})
    entry = text("y") + struct.pack("<IQQIQ", 2, 8, 4, 0, 128)
    moved = text("y") + struct.pack("<IQQIQ", 2, 8, 4, 0, 96)
    refused(tmp_path / "a.gguf", patched(data, entry, moved), "tensors x and y overlap")


def test_missing_file_folder_and_pipe(tmp_path: Path):
    with pytest.raises(UserError, match=re.escape(f"model={tmp_path}/no.gguf: is missing")):
        GgufFile(tmp_path / "no.gguf")
    with pytest.raises(UserError, match="is not a file"):
        GgufFile(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match="is not a file"):
        GgufFile(tmp_path / "pipe.gguf")
