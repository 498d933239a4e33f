"""Reference values, and how closely they are to be met."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "golden"
F64: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-15}
F32: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-7}


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of `tests/golden/<name>.npz`."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)
