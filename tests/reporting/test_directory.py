"""Who may write into a run's folder."""

import errno
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from etils import epath

from jaxlab.errors import UserError
from jaxlab.reporting import directory
from jaxlab.reporting.directory import check_writable, make_directory, own_directory

HOLD = """
import sys, time
from etils import epath
from jaxlab.reporting.directory import own_directory
with own_directory(epath.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that owns the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_by_host_and_pid(tmp_path, holder):
    expected = rf"run_dir=.*: in use by process {holder.pid} on {socket.gethostname()}; wait"
    with pytest.raises(UserError, match=expected), own_directory(epath.Path(tmp_path)):
        pass


def test_a_dead_owner_is_followed(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == holder.pid
    with own_directory(epath.Path(tmp_path)):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_the_lock_is_free_afterwards(tmp_path):
    for _ in range(2):
        with own_directory(epath.Path(tmp_path) / "run"):
            pass
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_an_owner_on_another_host_counts_while_it_renews(tmp_path, monkeypatch):
    lock = tmp_path / ".lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 17}))
    monkeypatch.setattr(directory, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(directory.time, "sleep", lambda _: os.utime(lock, (time.time(), 1)))
    with (
        pytest.raises(UserError, match="in use by process 17 on elsewhere"),
        own_directory(epath.Path(tmp_path)),
    ):
        pass


def test_a_silent_owner_on_another_host_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 17}))
    monkeypatch.setattr(directory, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(directory, "_STALE_SECONDS", 0.2)
    with own_directory(epath.Path(tmp_path)):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("running", [True, False])
def test_without_kernel_locks_the_owner_s_process_decides(tmp_path, monkeypatch, running):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(directory.fcntl, "flock", refuse)
    pid = os.getpid() if running else 2**22 + 1  # above the largest possible pid
    (tmp_path / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid}))
    if running:
        with pytest.raises(UserError, match="in use by"), own_directory(epath.Path(tmp_path)):
            pass
    else:
        with own_directory(epath.Path(tmp_path)):
            pass


def test_a_garbled_lock_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").write_text("{")
    with own_directory(epath.Path(tmp_path)):
        pass


def test_places_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match=r"run_dir=.*is a file, not a folder"):
        check_writable(file / "run")
    with pytest.raises(UserError, match="cannot be created"):
        make_directory(epath.Path(file) / "run")
    with pytest.raises(UserError, match=r"run_dir=/proc/jaxlab"):
        make_directory(epath.Path("/proc/jaxlab"))
    check_writable(tmp_path / "a" / "b" / "c")
    assert not (tmp_path / "a").exists()


def test_a_folder_without_permission(tmp_path, monkeypatch):
    # The superuser may write everywhere, so the answer of the system is put in place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="no permission to write in"):
        check_writable(tmp_path / "run")
