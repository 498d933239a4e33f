"""The folder of a run: who owns it, and what lies where.

config.yaml        all settings          checkpoints/     by program
environment.json   versions, devices     tensorboard/     events
metrics.jsonl      one line a log step   figures/*.png
result.json        metrics and claims    report.md
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import IO

from etils import epath

from jaxlab.errors import StorageError, UserError
from jaxlab.reporting.files import is_remote

__all__ = ["check_writable", "make_directory", "own_directory"]

_LOCK = ".lock"
_REFRESH_SECONDS = 15.0
_STALE_SECONDS = 75.0  # longer than network file systems keep attributes
_POLL_SECONDS = 1.0


def check_writable(path: os.PathLike[str] | str, field: str = "run_dir") -> None:
    """Raises early, before anything is created, if a folder could not be made or written.

    Args:
      path: a local folder that may not exist yet; remote ones are not checked.
      field: named in the error.

    Raises:
      UserError: a parent is a file, or is not writable.
    """
    if is_remote(path):
        return
    place = pathlib.Path(path).absolute()
    try:
        while not place.exists():
            place = place.parent
    except OSError as error:
        raise UserError(field, path, f"cannot be used: {error.strerror}") from None
    if not place.is_dir():
        raise UserError(field, path, f"{place} is a file, not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(field, path, f"no permission to write in {place}")


def make_directory(path: epath.Path, field: str = "run_dir") -> None:
    """Creates a folder and its parents.

    Raises:
      UserError: it cannot be created there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(field, path, f"cannot be created: {error.strerror or error}") from None


@contextlib.contextmanager
def own_directory(path: epath.Path) -> Iterator[None]:
    """Holds the folder's lock, so that no second process writes into the same run.

    The kernel frees the lock when its owner dies, however it dies. On file systems that several
    hosts share, the lock of another host may be invisible: an owner there counts as dead once it
    has not renewed the file for 75 seconds, which are waited for. Remote object
    stores have no locks: there the caller must not start twice.

    Raises:
      UserError: another process owns the run; the message names its host and pid.
    """
    if is_remote(path):
        yield
        return
    make_directory(path)
    name = os.fspath(path / _LOCK)
    try:
        file = open(name, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError("run_dir", path, f"cannot be written: {error.strerror}") from None
    with file:
        _acquire(file, path)
        done = threading.Event()
        keeper = threading.Thread(target=_keep_fresh, args=(name, done), daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()
            with contextlib.suppress(OSError):
                file.truncate(0)


def _acquire(file: IO[str], path: epath.Path) -> None:
    host = socket.gethostname()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alive = False
    except BlockingIOError:
        alive = True
    except OSError:
        # A file system without such locks: the owner's own signs of life must do.
        alive = _read(file)["host"] == host and _is_running(_read(file)["pid"])
    owner = _read(file)
    if not alive and owner["host"] not in (host, ""):
        alive = _renews(file)
    if alive:
        raise UserError(
            "run_dir",
            path,
            f"in use by process {owner['pid'] or 'unknown'} on {owner['host'] or host}; "
            "wait for it, stop it, or choose another run_dir",
        )
    try:
        file.truncate(0)
        file.write(json.dumps({"host": host, "pid": os.getpid()}))
        file.flush()
    except OSError as error:
        raise StorageError(f"run_dir={path}: cannot be written: {error.strerror}") from error


def _read(file: IO[str]) -> dict[str, str]:
    file.seek(0)
    return _owner(file.read())


def _renews(file: IO[str]) -> bool:
    """Whether an owner on another host, whose lock this host may not see, renews the file."""
    first = os.fstat(file.fileno()).st_mtime
    deadline = time.monotonic() + _STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if os.fstat(file.fileno()).st_mtime != first:
            return True
    return False


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _owner(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
        return {"host": str(found["host"]), "pid": str(found["pid"])}
    except (ValueError, KeyError, TypeError):
        return {"host": "", "pid": ""}


def _keep_fresh(name: str, done: threading.Event) -> None:
    while not done.wait(_REFRESH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(name)
