"""Worker of `benchmarks.decoder`: jaxlab loads, reads prompts and generates."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workers import peak_memory, serve
from jaxlab.models.generation import GenerationSettings, stream
from jaxlab.models.prefill import prefill
from jaxlab.models.pretrained.loading import Pretrained, load_pretrained

_PROMPT, _NEW = 128, 32


def _prompts(batch: int, length: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(5, vocab_size, (batch, length), np.int32)


class _Work:
    def __init__(self, path: str, kind: str) -> None:
        self.path = path
        self.dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
        self.loaded = self._load()

    def _load(self) -> Pretrained:
        loaded = load_pretrained(self.path, dtype=self.dtype, param_dtype=self.dtype)
        jax.block_until_ready(loaded.params)
        return loaded

    def load(self) -> dict[str, float]:
        """From the file to the parameters."""
        start = time.perf_counter()
        self.loaded = self._load()
        return {"seconds": time.perf_counter() - start, "memory": peak_memory()}

    def read(self, length: int) -> dict[str, float]:
        """A prompt, up to the logits after it."""
        model, params = self.loaded.model, self.loaded.params
        tokens = _prompts(1, length, model.vocab_size)
        start = time.perf_counter()
        # Memory stays bounded: long prompts are read in chunks.
        done = prefill(model, params, tokens, capacity=length, chunk=min(length, 1024))
        jax.block_until_ready(done.logits)
        return {"seconds": time.perf_counter() - start, "memory": peak_memory()}

    def decode(self, batch: int) -> dict[str, float]:
        """Seconds for a token of every row, without the prompt."""
        model, params = self.loaded.model, self.loaded.params
        settings = GenerationSettings(max_new_tokens=_NEW + 1)
        prompts = _prompts(batch, _PROMPT, model.vocab_size)
        parts = stream(model, params, prompts, settings=settings, tokens_per_dispatch=_NEW)
        next(parts)
        start = time.perf_counter()
        next(parts)
        return {"seconds": (time.perf_counter() - start) / _NEW, "memory": peak_memory()}


def main() -> None:
    """Loads the model given on the command line and answers."""
    work = _Work(sys.argv[1], sys.argv[2])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(work.loaded.params))
    facts: dict[str, Any] = {"versions": f"jax {jax.__version__}", "bytes": size}
    handlers = {"load": work.load}
    handlers |= {f"read {n}": functools.partial(work.read, n) for n in (128, 1024, 4096)}
    handlers |= {f"decode {n}": functools.partial(work.decode, n) for n in (1, 8)}
    serve(facts, handlers)


if __name__ == "__main__":
    main()
