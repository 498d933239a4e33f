from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxlab.errors import StorageError, UserError
from jaxlab.models.pretrained import safetensors_files
from jaxlab.models.pretrained.safetensors_files import (
    SafetensorsFile,
    ShardedSafetensors,
    save_safetensors,
)


def raw(fields: Any, data: bytes = b"") -> bytes:
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(header).to_bytes(8, "little") + header + data


def field(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(-7, np.int64),
    "c": np.array([True, False]),
    "d": np.arange(4).astype(ml_dtypes.bfloat16),
    "e": np.zeros((0, 3), np.float16),
    "f": np.arange(3, dtype=np.uint8),
}


def test_what_is_written_comes_back(tmp_path: Path):
    assert save_safetensors(tmp_path, TENSORS) == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert file.keys() == list(TENSORS)
    assert file.metadata == {"format": "pt"}
    for name, expected in TENSORS.items():
        found = file.read(name)
        assert not found.flags.writeable
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (file.dtype(name), file.shape(name)) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)


def test_the_library_reads_what_is_written_and_the_reverse(tmp_path: Path):
    save_safetensors(tmp_path, TENSORS)
    for name, found in safetensors.numpy.load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(found, TENSORS[name])
    safetensors.numpy.save_file(TENSORS, tmp_path / "theirs.safetensors", {"k": "v"})
    file = SafetensorsFile(tmp_path / "theirs.safetensors")
    assert set(file.keys()) == set(TENSORS)
    assert file.metadata == {"k": "v"}
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(file.read(name), expected)


def test_jax_arrays_and_views_are_written(tmp_path: Path):
    save_safetensors(tmp_path, {"x": jnp.arange(3, dtype=jnp.bfloat16), "y": TENSORS["a"].T})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(file.read("x"), np.arange(3).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(file.read("y"), TENSORS["a"].T)


def test_shards_hold_what_fits_and_an_index_finds_it(tmp_path: Path):
    tensors = {name: np.full(4, index, np.float32) for index, name in enumerate("pqrst")}
    tensors["t"] = np.arange(12, dtype=np.float32)
    names = save_safetensors(tmp_path, tensors, max_shard_bytes=32)
    assert names == [
        *(f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"] == {"total_size": 112}
    assert list(index["weight_map"].values()) == [names[0]] * 2 + [names[1]] * 2 + [names[2]]
    file = ShardedSafetensors(tmp_path / names[-1])
    assert file.keys() == list(tensors)
    for name, expected in tensors.items():
        assert (file.dtype(name), file.shape(name)) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(file.read(name), expected)


def test_a_new_save_removes_the_files_of_the_old_one(tmp_path: Path):
    (tmp_path / "model-notes.safetensors").write_bytes(b"mine")
    tensors = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    save_safetensors(tmp_path, tensors, max_shard_bytes=16)
    save_safetensors(tmp_path, tensors)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["model-notes.safetensors", "model.safetensors"]
    save_safetensors(tmp_path, tensors, max_shard_bytes=16)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_safetensors(tmp_path, {"a": np.ones(2, np.float32)})
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_files.os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*: No space left on device"):
        save_safetensors(tmp_path, {"a": np.zeros(2, np.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="must hold at least one"):
        save_safetensors(tmp_path, {})
    with pytest.raises(ValueError, match="tensor x has type complex64; allowed: F64"):
        save_safetensors(tmp_path, {"x": np.zeros(1, np.complex64)})
    with pytest.raises(ValueError, match="max_shard_bytes=0: must be at least 1"):
        save_safetensors(tmp_path, TENSORS, max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


GOOD = raw({"x": field()}, b"\0" * 4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\1\2", "not a whole one: a header of 513 bytes in a file of 2"),
        (b"\xff" * 20, "a header of 18446744073709551615 bytes in a file of 20"),
        (GOOD[:30], "not a whole one"),
        (GOOD[:-1], "ends at byte .* is it whole"),
        (GOOD + b"\0", "has 5 bytes of data, but its tensors take 4"),
        (raw(b"{not json}"), "header is not valid JSON"),
        (raw(b"[1, 2]"), "header is not a JSON object"),
        (raw(b'{"a": "\xff"}'), "header is not valid JSON"),
        (raw(b"[" * 5000), "nested too deeply|not valid JSON"),
        (raw(b'{"x": %s}' % (b"9" * 5000)), "not valid JSON"),
        (raw(b'{"x": 1, "x": 2}'), "a name stands there twice"),
        (raw({"__metadata__": {"a": 1}}), "__metadata__ are not texts"),
        (raw({"x": 3}), "tensor x lacks a dtype"),
        (raw({"x": {"dtype": "F32", "shape": [1]}}), "tensor x lacks a dtype"),
        (raw({"x": field(offsets=(0, 2, 4))}), "two data_offsets"),
        (raw({"x": field("F8_E4M3", (4,))}, b"\0" * 4), "tensor x has type F8_E4M3; supported"),
        (raw({"x": field(["F32"])}, b"\0" * 4), "has type"),
        (raw({"x": field(shape=(-1, -1))}, b"\0" * 4), "no usable shape"),
        (raw({"x": field(shape=(1.0,))}, b"\0" * 4), "no usable shape"),
        (raw({"x": field(shape=(True,))}, b"\0" * 4), "no usable shape"),
        (raw({"x": field(shape=(2**62, 2**62))}, b"\0" * 4), "but has 4"),
        (raw({"x": field(shape=(2**62,) * 40)}, b"\0" * 4), "no usable shape"),
        (raw({"x": field(offsets=(4, 0))}, b"\0" * 4), "needs 4 bytes, but has -4"),
        (raw({"x": field(offsets=(2**40, 2**40 + 4))}, b"\0" * 4), "is it whole"),
        (raw({"x": field(), "y": field(offsets=(2, 6))}, b"\0" * 8), "tensors x and y overlap"),
        (raw({"x": field(), "y": field()}, b"\0" * 8), "tensors x and y overlap"),
        (raw({"x": field(), "y": field(offsets=(8, 12))}, b"\0" * 12), "its tensors take 8"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, data: bytes, words: str):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "the index is not valid JSON"),
        ({"metadata": {}}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, "missing: two.safetens"),
        ({"weight_map": {"z": "one.safetensors"}}, "their files do not hold: z"),
        ({"weight_map": {"a": "../one.safetensors"}}, r"puts a into ../one.safetensors, which"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no file's name"),
        ({"weight_map": {"a": ".."}}, "no file's name"),
        ({"weight_map": {"a": 3}}, "puts a into 3"),
    ],
)
def test_an_index_that_does_not_fit_is_one_line(tmp_path: Path, index: Any, words: str):
    (tmp_path / "one.safetensors").write_bytes(raw({"a": field()}, b"\0" * 4))
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(UserError, match=words) as caught:
        ShardedSafetensors(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_shard_is_named(tmp_path: Path):
    (tmp_path / "one.safetensors").write_bytes(raw({"a": field()}))
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(UserError, match=r"one\.safetensors: tensor a ends"):
        ShardedSafetensors(path)
