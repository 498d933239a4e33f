"""What a run needs of its process: signals, the compilation cache, and a record of the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from jaxlab.errors import UserError
from jaxlab.experiments.base import CommandConfig, RunConfig
from jaxlab.parallel.mesh import make_mesh

__all__ = [
    "chosen_mesh",
    "compilation_cache",
    "describe_environment",
    "free_memory",
    "machine_name",
    "peak_memory",
    "stop_requests",
]

_PACKAGES = (
    "jaxlab",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "chex",
    "numpy",
    "scipy",
    "hydra-core",
    "pydantic",
)


@contextlib.contextmanager
def stop_requests(enabled: bool, *, notice: str = "saving") -> Iterator[Callable[[], int | None]]:
    """Turns SIGINT and SIGTERM into a question that is asked at every dispatch.

    A second signal ends the process at once. Nothing is installed outside the main thread or
    where `enabled` is false: there Ctrl-C is an ordinary KeyboardInterrupt.
    """
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)
        if sys.stderr.isatty():
            print(f"\njaxlab: {notice}; once more to quit at once", file=sys.stderr, flush=True)

    if not enabled or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def chosen_mesh(config: CommandConfig) -> Mesh | None:
    """The mesh that the user asks for; several processes always share one.

    Raises:
      UserError: the machine's devices do not make it.
    """
    sizes = dataclasses.asdict(config.mesh)
    if set(sizes.values()) == {1}:
        if jax.process_count() == 1:
            return None
        sizes["data"] = -1
    return make_mesh(**sizes)


@contextlib.contextmanager
def compilation_cache(choice: str) -> Iterator[None]:
    """Makes JAX keep compiled programs between processes, for the time of a run.

    Args:
      choice: a folder, `off`, or `auto`: JAX's own setting where the environment has one, else
        a folder in the user's cache. With `auto` a folder that cannot be written means no cache.

    Raises:
      UserError: the given folder cannot be written.
    """
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    folder = _cache_folder(choice)
    jax.config.update(names[0], choice != "off" and before[names[0]])
    if folder is not None:
        jax.config.update(names[1], str(folder.absolute()))
        jax.config.update(names[2], 0.1)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _cache_folder(choice: str) -> pathlib.Path | None:
    """The folder to use, made and tried; None leaves JAX's setting."""
    if choice == "off" or (choice == "auto" and os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "jaxlab" / "xla" if choice == "auto" else pathlib.Path(choice)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        if choice == "auto":
            return None
        problem = f"cannot be written: {error.strerror}"
        raise UserError("compilation_cache", choice, problem) from None
    return folder


def describe_environment(config: RunConfig) -> dict[str, Any]:
    """What is needed to understand a result later: versions, devices, code, precision, seeds."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": machine_name(),
        "processors": os.cpu_count(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in devices],
        "processes": jax.process_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_revision": _git_revision(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": config.precision,
        "threads": {
            name: os.environ[name]
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
            if name in os.environ
        },
        "seeds": [config.seed + r for r in range(config.replicates)],
        "command": sys.argv,
    }


def machine_name() -> str:
    """The devices in words, e.g. `cpu x1 (2 processors)`."""
    devices = jax.devices()
    kind = devices[0].device_kind
    suffix = f" ({os.cpu_count()} processors)" if devices[0].platform == "cpu" else ""
    return f"{kind} x{len(devices)}{suffix}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The revision of the checkout that this package lies in, marked when it was changed."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        revision, changes = (
            subprocess.run(
                ["git", "-C", str(root), *words],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if changes else "")


def free_memory() -> int | None:
    """Bytes that the device that computes has free; None where that cannot be told."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    available = sizes.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def peak_memory() -> dict[str, int]:
    """The largest use of memory so far in bytes, by kind: the process's own, and the devices'."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [int(stat["peak_bytes_in_use"]) for stat in stats if "peak_bytes_in_use" in stat]
    if peaks:
        found["device"] = max(peaks)
    return found
