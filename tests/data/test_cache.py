import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxlab.data import cache
from jaxlab.data.cache import cache_folder, cached, discard
from jaxlab.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXLAB_DATA_CACHE", str(folder))
    return folder


def builder(content: bytes = b"data", calls: list | None = None):
    def build(folder: Path) -> None:
        if calls is not None:
            calls.append(folder)
        (folder / "inner").mkdir()
        (folder / "inner" / "tokens.bin").write_bytes(content)

    return build


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_where_the_cache_lies(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("JAXLAB_DATA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/jaxlab/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/home/somebody/.cache/jaxlab/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_folder() == Path("/scratch/jaxlab/data")
    monkeypatch.setenv("JAXLAB_DATA_CACHE", "~/mine")
    assert cache_folder() == Path("/home/somebody/mine")
    monkeypatch.setenv("JAXLAB_DATA_CACHE", "mine")
    assert cache_folder() == Path.cwd() / "mine"


def test_builds_once(folder):
    calls: list[Path] = []
    first = cached("a-1", builder(calls=calls))
    assert first == folder / "a-1"
    assert cached("a-1", builder(b"other", calls)) == first
    assert (first / "inner" / "tokens.bin").read_bytes() == b"data"
    assert len(calls) == 1
    # Built beside its place, so that the last step is a renaming on one file system.
    assert calls[0].parent == folder
    assert listing(folder) == [
        "a-1",
        "a-1/complete.json",
        "a-1/inner",
        "a-1/inner/tokens.bin",
    ]


def test_is_as_readable_as_other_folders_of_this_user(folder):
    old = os.umask(0o022)
    try:
        assert stat.S_IMODE(cached("a", builder()).stat().st_mode) == 0o755
    finally:
        os.umask(old)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), UserError("a", 1, "b")])
def test_a_failed_build_leaves_nothing(folder, error):
    cached("other", builder())
    before = listing(folder)

    def build(folder: Path) -> None:
        builder()(folder)
        raise error

    with pytest.raises(type(error)):
        cached("a", build)
    assert listing(folder) == before
    assert cached("a", builder()) == folder / "a"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "complete.json").unlink(),
        lambda folder: (folder / "complete.json").write_text(""),
        lambda folder: (folder / "complete.json").write_text("[]"),
        lambda folder: (folder / "inner" / "tokens.bin").write_bytes(b"dat"),
        lambda folder: (folder / "inner" / "tokens.bin").unlink(),
    ],
)
def test_what_is_not_whole_is_built_anew(folder, damage):
    damage(cached("a", builder()))
    calls: list[Path] = []
    whole = cached("a", builder(b"new", calls))
    assert (whole / "inner" / "tokens.bin").read_bytes() == b"new"
    assert len(calls) == 1
    assert len(listing(folder)) == 4


def test_a_file_in_the_place_of_the_folder_gives_way(folder):
    folder.mkdir()
    (folder / "a").write_text("mine")
    (folder / "b").symlink_to("nowhere")
    assert (cached("a", builder()) / "inner" / "tokens.bin").exists()
    assert (cached("b", builder()) / "inner" / "tokens.bin").exists()
    assert len(listing(folder)) == 8


def test_two_at_once_end_with_one(folder):
    together = threading.Barrier(2, timeout=30)
    results, errors = [], []

    def build(content: bytes):
        def write(folder: Path) -> None:
            builder(content)(folder)
            together.wait()

        try:
            results.append(cached("a", write))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build, args=(content,)) for content in (b"1111", b"2222")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results == [folder / "a"] * 2
    assert (folder / "a" / "inner" / "tokens.bin").read_bytes() in (b"1111", b"2222")
    assert len(listing(folder)) == 4


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_builds_is_not(folder):
    program = (
        "import sys; from jaxlab.data.cache import cached\n"
        "def build(folder):\n"
        "    (folder / 'half').write_text('half'); print('ready', flush=True); sys.stdin.read()\n"
        "cached('a', build)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            cached("b", builder())
            assert sum(name.endswith("/half") for name in listing(folder)) == 1
        finally:
            process.send_signal(signal.SIGKILL)
    assert not (folder / "a").exists()
    cached("b", builder())
    assert sum(name.endswith("/half") for name in listing(folder)) == 1
    cached("c", builder())
    assert sum(name.endswith("/half") for name in listing(folder)) == 0
    assert {path.name for path in folder.iterdir()} == {"b", "c"}


def test_a_folder_swept_before_it_was_locked_is_made_again(folder, monkeypatch):
    flock, swept = cache.fcntl.flock, []

    def sweeping(lock: int, operation: int) -> None:
        if not swept:
            (made,) = folder.iterdir()
            made.rmdir()
            swept.append(made)
        flock(lock, operation)

    monkeypatch.setattr(cache.fcntl, "flock", sweeping)
    assert (cached("a", builder()) / "inner" / "tokens.bin").exists()
    assert swept
    assert len(listing(folder)) == 4


def test_discard(folder):
    discard("a")
    cached("a", builder())
    discard("a")
    assert listing(folder) == []


@pytest.mark.parametrize("key", ["", ".", "..", ".hidden", "a/b", "a b", "é", "a" * 201, "a\n"])
def test_other_keys_are_refused(folder, key):
    with pytest.raises(ValueError, match="key="):
        cached(key, builder())
    with pytest.raises(ValueError, match="key="):
        discard(key)
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXLAB_DATA_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"JAXLAB_DATA_CACHE=.*file: cannot be written: ") as caught:
        cached("a", builder())
    assert "\n" not in str(caught.value)


def test_a_full_disk_stays_what_it_is(folder, monkeypatch):
    def full(self, target):
        raise OSError(cache.errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        cached("a", builder())
    assert listing(folder) == []
