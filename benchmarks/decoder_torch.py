"""Worker of `benchmarks.decoder`: PyTorch's `transformers` loads, reads prompts and generates."""

from __future__ import annotations

import functools
import os
import sys
import time

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.workers import peak_memory, serve

_PROMPT, _NEW, _SHORT = 128, 32, 16


@torch.no_grad()
def _loaded(path: str, kind: str) -> torch.nn.Module:
    file: dict[str, str] = {}
    if not os.path.isdir(path):
        path, file["gguf_file"] = os.path.split(path)
    dtype = getattr(torch, "float32" if kind == "int8" else kind)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **file).eval()
    if kind == "int8":
        linear = {torch.nn.Linear}
        model = torch.ao.quantization.quantize_dynamic(model, linear, dtype=torch.qint8)
    return model


def _prompts(model: torch.nn.Module, batch: int, length: int) -> torch.Tensor:
    size = model.config.vocab_size
    tokens = np.random.default_rng(0).integers(5, size, (batch, length), np.int64)
    return torch.from_numpy(tokens)


class _Work:
    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.model = _loaded(path, kind)

    def load(self, path: str) -> dict[str, float]:
        """From a file or folder to the parameters."""
        start = time.perf_counter()
        self.model = _loaded(path, self.kind)
        return {"seconds": time.perf_counter() - start, "memory": peak_memory()}

    @torch.no_grad()
    def read(self, length: int) -> dict[str, float]:
        """A prompt, up to the logits after it."""
        tokens = _prompts(self.model, 1, length)
        start = time.perf_counter()
        self.model(tokens, use_cache=True, logits_to_keep=1)
        return {"seconds": time.perf_counter() - start, "memory": peak_memory()}

    @torch.no_grad()
    def decode(self, batch: int) -> dict[str, float]:
        """Seconds for a token of every row, without the prompt; greedy."""
        found = self.model(_prompts(self.model, batch, _PROMPT), use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(_NEW):
            newest = found.logits[:, -1:].argmax(-1)
            found = self.model(newest, past_key_values=found.past_key_values, use_cache=True)
        return {"seconds": (time.perf_counter() - start) / _NEW, "memory": peak_memory()}


@torch.no_grad()
def _first_token(kind: str, folder: str) -> None:
    """Gives the token after a short prompt."""
    model = _loaded(folder, kind)
    model(_prompts(model, 1, _SHORT), use_cache=True, logits_to_keep=1).logits.argmax().item()


def main() -> None:
    """Answers requests, or says that it is ready once it has a first token."""
    mode, kind, threads, folder, place = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if mode == "first":
        _first_token(kind, folder)
        serve({"memory": peak_memory()}, {})
        return
    work = _Work(kind, place)
    handlers = {"load": functools.partial(work.load, place)}
    handlers |= {"load folder": functools.partial(work.load, folder)}
    handlers |= {f"read {n}": functools.partial(work.read, n) for n in (128, 1024, 4096)}
    handlers |= {f"decode {n}": functools.partial(work.decode, n) for n in (1, 8)}
    serve(
        {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"},
        handlers,
    )


if __name__ == "__main__":
    main()
