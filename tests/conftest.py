"""Strictness that every test runs under, and one compilation cache for the whole session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """For models so small that compiling takes longer than running."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all subprocesses of a session keep their compiled programs."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="session")
def run_cli(cache_folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m jaxlab.run` with these words in a process of its own."""

    def run(*words: str, cwd: Path, environment: dict[str, str] | None = None):
        return subprocess.run(
            [sys.executable, "-m", "jaxlab.run", *words],
            cwd=cwd,
            env={
                **os.environ,
                "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
                "JAX_PLATFORMS": "cpu",
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
