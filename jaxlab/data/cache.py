"""Prepared data on disk: built once, used by every later run, never seen half-built."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxlab.errors import UserError

__all__ = ["cache_folder", "cached", "discard"]

_VARIABLE = "JAXLAB_DATA_CACHE"
_MARKER = "complete.json"
_PREFIX = ".jaxlab-building-"
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def cache_folder() -> Path:
    """Where prepared data lies; it need not exist yet.

    That is `JAXLAB_DATA_CACHE` if it is set, else `jaxlab/data` in `XDG_CACHE_HOME`, else
    `~/.cache/jaxlab/data`.

    Raises:
      UserError: none of them is set and there is no home folder.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    general = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(general):
        return Path(general, "jaxlab", "data")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise UserError(_VARIABLE, "", "there is no home folder; allowed: a folder for data")
    return Path(home, ".cache", "jaxlab", "data")


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache, built first if it is not there whole.

    `build` gets an empty folder beside it, which takes the name in one step when `build` has
    returned. Whatever `build` raises leaves nothing behind. Of several processes that build the
    same at once, one wins and the others discard their own. A folder that lacks a file it was
    built with, or has one of another size, is built anew. Leavings of killed processes are
    removed.

    Args:
      key: letters, digits, `_`, `.` and `-`; has to tell apart whatever has other content.
      build: fills the folder that it is given.

    Returns:
      The folder; to be read only.

    Raises:
      ValueError: the key is of another form.
      UserError: the cache cannot be written.
    """
    folder = _entry(key)
    if _is_complete(folder):
        return folder
    with _building_folder(folder.parent) as temporary:
        build(temporary)
        sizes = {
            path.relative_to(temporary).as_posix(): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        (temporary / _MARKER).write_text(json.dumps(sizes) + "\n", encoding="utf-8")
        _publish(temporary, folder)
    return folder


def discard(key: str) -> None:
    """Removes a folder from the cache, if it is there.

    Raises:
      ValueError: the key is of a form that `cached` does not take.
      UserError: the cache cannot be written.
    """
    folder = _entry(key)
    if os.path.lexists(folder):
        with _explained(folder.parent):
            _remove(folder)


def _entry(key: str) -> Path:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key={key!r:.80}: must be letters, digits, '_', '.' and '-'")
    return cache_folder() / key


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def _explained(cache: Path) -> Iterator[None]:
    """Says which folder is at fault; a full disk is told by the command line itself."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        reason = error.strerror or type(error).__name__
        raise UserError(
            _VARIABLE, cache, f"cannot be written: {reason}; allowed: a folder that can be"
        ) from error


@contextlib.contextmanager
def _building_folder(cache: Path) -> Iterator[Path]:
    """A new folder that is locked while it is in use, and gone afterwards."""
    with _explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_leavings(cache)
        temporary, lock = _new_locked_folder(cache)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _new_locked_folder(cache: Path) -> tuple[Path, int]:
    while True:
        temporary = cache / f"{_PREFIX}{secrets.token_hex(8)}"
        # Not tempfile.mkdtemp, whose folders nobody else can read.
        temporary.mkdir()
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(temporary, os.O_RDONLY)
            with contextlib.suppress(OSError):  # without locks nothing is ever swept
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have taken it for a leaving before it was locked.
            if temporary.exists():
                return temporary, lock
            os.close(lock)


def _remove_leavings(cache: Path) -> None:
    """Removes what killed processes were building: the kernel has freed their locks."""
    for leaving in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(leaving, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leaving, ignore_errors=True)
            finally:
                os.close(lock)


def _publish(temporary: Path, folder: Path) -> None:
    with _explained(folder.parent):
        while True:
            try:
                temporary.rename(folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if _is_complete(folder):
                return
            _remove(folder)


def _remove(folder: Path) -> None:
    # First out of the way in one step, so that nobody meets it half-removed.
    doomed = folder.with_name(f"{_PREFIX}{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()
