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

_PROMPT, _NEW = 128, 32


class _Work:
    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind = path, getattr(torch, kind)
        self.model = self._load()

    def _load(self) -> torch.nn.Module:
        folder, name = os.path.split(self.path)
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=self.kind
            ).eval()

    def _prompts(self, batch: int, length: int) -> torch.Tensor:
        size = self.model.config.vocab_size
        tokens = np.random.default_rng(0).integers(5, size, (batch, length), np.int64)
        return torch.from_numpy(tokens)

    def load(self) -> dict[str, float]:
        """From the file to the parameters."""
        start = time.perf_counter()
        self.model = self._load()
        return {"seconds": time.perf_counter() - start, "memory": peak_memory()}

    @torch.no_grad()
    def read(self, length: int) -> dict[str, float]:
        """A prompt, up to the logits after it."""
        tokens = self._prompts(1, length)
        start = time.perf_counter()
        self.model(tokens, use_cache=True, logits_to_keep=1)
        return {"seconds": time.perf_counter() - start, "memory": peak_memory()}

    @torch.no_grad()
    def decode(self, batch: int) -> dict[str, float]:
        """Seconds for a token of every row, without the prompt; greedy."""
        found = self.model(self._prompts(batch, _PROMPT), use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(_NEW):
            newest = found.logits[:, -1:].argmax(-1)
            found = self.model(newest, past_key_values=found.past_key_values, use_cache=True)
        return {"seconds": (time.perf_counter() - start) / _NEW, "memory": peak_memory()}


def main() -> None:
    """Loads the model given on the command line and answers."""
    torch.set_num_threads(int(sys.argv[3]))
    work = _Work(sys.argv[1], sys.argv[2])
    handlers = {"load": work.load}
    handlers |= {f"read {n}": functools.partial(work.read, n) for n in (128, 1024, 4096)}
    handlers |= {f"decode {n}": functools.partial(work.decode, n) for n in (1, 8)}
    serve(
        {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"},
        handlers,
    )


if __name__ == "__main__":
    main()
