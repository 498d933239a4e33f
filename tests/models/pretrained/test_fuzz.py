"""Damaged files of either format load, or say in one line what is wrong; nothing else happens."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlab.errors import UserError
from jaxlab.models.pretrained.gguf_source import GgufSource
from jaxlab.models.pretrained.safetensors_files import SafetensorsFile, save_safetensors
from tests.models.pretrained.gguf_writer import llama_metadata, llama_tensors, write_gguf

CASES = 100
MEMORY = 8_000_000


def tiny_safetensors(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    sizes = {"embed": (11, 4), "norm": (4,), "layer.weight": (4, 4), "layer.bias": (4,)}
    save_safetensors(folder, {n: rng.standard_normal(s, np.float32) for n, s in sizes.items()})
    return folder / "model.safetensors"


def tiny_gguf(folder: Path) -> Path:
    tensors = llama_tensors(layers=1)
    scales = np.full(16, 0.5, "<f2").view("u1").reshape(16, 2)
    blocks = np.concatenate([scales, np.ones((16, 32), np.uint8)], axis=1)
    tensors["blk.0.attn_k.weight"] = ("Q8_0", (16, 32), blocks.tobytes())
    return write_gguf(folder / "tiny.gguf", llama_metadata(layers=1), tensors)


def header_size(data: bytes) -> int:
    if data.startswith(b"GGUF"):
        return data.rindex(b"output_norm.weight") + 48
    return 8 + int.from_bytes(data[:8], "little")


def damaged(data: bytes, seed: int) -> Iterator[bytes]:
    """Truncations anywhere, then bytes of the header changed: one, or a few beside each other."""
    rng = np.random.default_rng(seed)
    for _ in range(CASES):
        yield data[: rng.integers(0, len(data))]
    for case in range(CASES):
        changed = bytearray(data)
        start = int(rng.integers(0, header_size(data)))
        for place in range(start, min(start + 1 + case % 4, header_size(data))):
            changed[place] ^= int(rng.integers(1, 256))
        yield bytes(changed)


def outcome(load: Callable[[Path], Any], path: Path) -> str:
    """Empty where everything can be read, else the message."""
    try:
        source = load(path)
        for name in list(source.keys()):
            assert source.read(name).shape == source.shape(name)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "load"), [(tiny_safetensors, SafetensorsFile), (tiny_gguf, GgufSource)]
)
def test_damaged_files_load_or_say_why(
    tmp_path: Path, make: Callable[[Path], Path], load: Callable[[Path], Any]
):
    path = make(tmp_path)
    data = path.read_bytes()
    assert outcome(load, path) == ""
    tracemalloc.start()
    try:
        found = []
        for case in damaged(data, seed=len(data)):
            path.write_bytes(case)
            found.append(outcome(load, path))
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert not any("\n" in message for message in found)
    # A truncated file is never whole; a changed byte in a name or a number often does no harm.
    assert all(found[:CASES])
    assert not all(found[CASES:])
