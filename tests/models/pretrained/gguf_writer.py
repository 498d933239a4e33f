"""Writes GGUF files for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ2_XXS": 16,
    "IQ4_NL": 20,
    "F64": 28,
    "BF16": 30,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_bytes(value: Any) -> bytes:
    """A value with its type in front: bool, uint32, float32, text, or a list of one of these."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kind = {str: 8, int: 5, float: 6}[type(value[0])]
    head = struct.pack("<IIQ", 9, kind, len(value))
    if kind == 8:
        return head + b"".join(text(word) for word in value)
    return head + np.array(value, "<i4" if kind == 5 else "<f4").tobytes()


def stored(array: np.ndarray, kind: str = "F32") -> tuple[str, tuple[int, ...], bytes]:
    """A tensor for `write_gguf` from values that the type holds."""
    types = {"F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "F64": "<f8"}
    return kind, array.shape, array.astype(types[kind]).tobytes()


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    alignment: int = 32,
) -> bytes:
    """The bytes of a file; shapes have the slowest axis first."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += text(key) + value_bytes(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        out += text(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        out += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw + b"\0" * (-len(raw) % alignment)
    return out + b"\0" * (-len(out) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCAB = 4, 2, 8, 32, 64, 11


def llama_metadata(architecture: str = "llama", layers: int = 2, **more: Any) -> dict[str, Any]:
    """Metadata of a tiny model with a vocabulary."""
    return {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": HIDDEN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(VOCAB)],
        "tokenizer.ggml.token_type": [3, *[1] * (VOCAB - 1)],
        "tokenizer.ggml.merges": ["t 1", "t 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    } | {key.replace("__", "."): value for key, value in more.items()}


def llama_shapes(layers: int = 2) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the file of a tied Llama model."""
    rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH)}
    for index in range(layers):
        shapes |= {
            f"blk.{index}.attn_norm.weight": (WIDTH,),
            f"blk.{index}.attn_q.weight": (rows, WIDTH),
            f"blk.{index}.attn_k.weight": (kv_rows, WIDTH),
            f"blk.{index}.attn_v.weight": (kv_rows, WIDTH),
            f"blk.{index}.attn_output.weight": (WIDTH, rows),
            f"blk.{index}.ffn_norm.weight": (WIDTH,),
            f"blk.{index}.ffn_gate.weight": (HIDDEN, WIDTH),
            f"blk.{index}.ffn_up.weight": (HIDDEN, WIDTH),
            f"blk.{index}.ffn_down.weight": (WIDTH, HIDDEN),
        }
    return shapes | {"output_norm.weight": (WIDTH,)}


def llama_tensors(layers: int = 2, seed: int = 0) -> dict[str, Any]:
    """Random float32 tensors for `llama_shapes`."""
    rng = np.random.default_rng(seed)
    return {
        name: stored(rng.standard_normal(shape).astype(np.float32))
        for name, shape in llama_shapes(layers).items()
    }
