"""Files are written whole or not at all, and JSON is strictly valid."""

from __future__ import annotations

import json
import os
import pathlib
import threading
from typing import Any

import numpy as np
import pytest
from etils import epath

from jaxlab.errors import StorageError
from jaxlab.reporting.files import is_remote, read_json, to_plain, write_atomic, write_json


@pytest.mark.parametrize("make", [str, pathlib.Path, epath.Path])
@pytest.mark.parametrize(("data", "stored"), [("Fréchet\n", "Fréchet\n".encode()), (b"\0", b"\0")])
def test_write_atomic_accepts_every_path_and_both_kinds_of_data(tmp_path, make, data, stored):
    write_atomic(make(tmp_path / "file"), data)
    assert (tmp_path / "file").read_bytes() == stored
    write_atomic(make(tmp_path / "file"), data + data)
    assert (tmp_path / "file").read_bytes() == stored + stored
    assert os.listdir(tmp_path) == ["file"]


def test_write_atomic_of_a_bare_name_writes_into_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomic("file", "x")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), StorageError), (KeyboardInterrupt(), None)],
)
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, function, error, raised):
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(raised or type(error)) as caught:
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]
    if raised:
        assert str(caught.value) == f"cannot write {path}: No space left on device"


def test_missing_folder_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="No such file or directory"):
        write_atomic(tmp_path / "absent" / "file", "x")


def test_wrong_type_is_refused_before_anything_is_written(tmp_path):
    not_bytes: Any = 3
    with pytest.raises(TypeError, match="int"):
        write_atomic(tmp_path / "file", not_bytes)
    assert os.listdir(tmp_path) == []


def test_file_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_readers_see_only_whole_files(tmp_path):
    path = tmp_path / "file"
    contents = [b"a" * 300_000, b"b" * 200_000]
    write_atomic(path, contents[0])

    def write() -> None:
        for i in range(30):
            write_atomic(path, contents[i % 2])

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(contents)


def test_remote_paths_are_written_and_read_through_epath(tmp_path):
    def open_local(original: Any, path: Any, mode: str) -> Any:
        assert str(path).startswith("gs://bucket/")
        return original(str(path).replace("gs://bucket", str(tmp_path)), mode)

    with epath.testing.mock_epath(open=open_local):
        write_json("gs://bucket/result.json", {"loss": 1.5})
        assert read_json(epath.Path("gs://bucket") / "result.json") == {"loss": 1.5}
        with pytest.raises(StorageError, match="cannot write gs://bucket/absent/file"):
            write_atomic("gs://bucket/absent/file", "x")
    assert os.listdir(tmp_path) == ["result.json"]


def test_is_remote():
    assert is_remote(epath.Path("s3://bucket/run"))
    assert not is_remote(pathlib.Path("runs/trec"))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(np.nan), None),
        (-np.inf, None),
        (np.bool_(True), True),
        (np.int8(3), 3),
        (np.array(2.5), 2.5),
        (np.array([[1, 2]], dtype=np.uint16), [[1, 2]]),
        (np.array([1.0, np.inf], dtype=np.float16), [1.0, None]),
        (np.array(["a"]), ["a"]),
        ((1, [None, "x"]), [1, [None, "x"]]),
        ({np.int64(1): {"a": ()}}, {"1": {"a": []}}),
        (pathlib.PurePosixPath("runs/trec"), "runs/trec"),
        (np.str_("text"), "text"),
    ],
)
def test_to_plain(value, plain):
    result = to_plain(value)
    assert result == plain
    assert type(result) is type(plain)
    assert json.loads(json.dumps(result, allow_nan=False)) == plain


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({1, 2}, TypeError),
        (1j, TypeError),
        (b"bytes", TypeError),
        (np.array([1j]), TypeError),
        (np.array([None]), TypeError),
        ({1.5: 0}, TypeError),
        ({1: 0, "1": 0}, ValueError),
    ],
)
def test_what_json_cannot_express_is_refused(tmp_path, value, error):
    with pytest.raises(error):
        write_json(tmp_path / "file", {"nested": [value]})
    assert os.listdir(tmp_path) == []


def test_json_round_trip_is_exact_and_strict(tmp_path):
    values = np.random.default_rng(0).normal(size=50)
    write_json(tmp_path / "file", {"values": values, "bad": [float("nan"), -float("inf")]})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "file").read_text()
    json.loads(text, parse_constant=refuse)
    assert text.endswith("}\n")
    assert read_json(tmp_path / "file") == {"values": values.tolist(), "bad": [None, None]}


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_broken_json_is_named(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'file'} is not valid JSON"):
        read_json(tmp_path / "file")


def test_missing_json_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent")
