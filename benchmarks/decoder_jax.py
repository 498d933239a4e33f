"""Worker of `benchmarks.decoder`: jaxlab loads, reads prompts and generates."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workers import peak_memory, serve
from jaxlab.experiments.machine import compilation_cache
from jaxlab.models.generation import GenerationSettings, stream
from jaxlab.models.int8_weights import quantize_weights
from jaxlab.models.prefill import prefill
from jaxlab.models.pretrained.loading import Pretrained, load_pretrained, save_pretrained

_PROMPT, _NEW, _SHORT = 128, 32, 16


def _prompts(batch: int, length: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(5, vocab_size, (batch, length), np.int32)


def _loaded(path: str, kind: str) -> Pretrained:
    dtype = jnp.dtype("float32" if kind == "int8" else kind)
    loaded = load_pretrained(path, dtype=dtype, param_dtype=dtype)
    if kind == "int8":
        loaded = dataclasses.replace(loaded, params=quantize_weights(loaded.params))
    jax.block_until_ready(loaded.params)
    return loaded


class _Work:
    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.loaded = _loaded(path, kind)

    def load(self, path: str) -> dict[str, float]:
        """From a file or folder to the parameters."""
        start = time.perf_counter()
        self.loaded = _loaded(path, self.kind)
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


def _first_token(kind: str, folder: str, cache: str) -> None:
    """Gives the token after a short prompt; programs are kept in `cache`."""
    with compilation_cache(cache):
        loaded = _loaded(folder, kind)
        settings = GenerationSettings(max_new_tokens=_NEW)
        prompts = _prompts(1, _SHORT, loaded.model.vocab_size)
        next(stream(loaded.model, loaded.params, prompts, settings=settings))


def _export(folder: str, path: str) -> None:
    """Writes the model as a folder that both libraries load."""
    found = load_pretrained(path)
    generation = found.generation_config
    save_pretrained(folder, found.params, found.model, found.config, generation_config=generation)


def main() -> None:
    """Answers requests, or says that it is ready once something is done."""
    mode, kind, _, folder, place = sys.argv[1:]
    if mode == "export":
        _export(folder, place)
        serve({}, {})
        return
    if mode == "first":
        _first_token(kind, folder, place)
        serve({"memory": peak_memory()}, {})
        return
    work = _Work(kind, place)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(work.loaded.params))
    facts: dict[str, Any] = {"versions": f"jax {jax.__version__}", "bytes": size}
    handlers = {"load": functools.partial(work.load, place)}
    handlers |= {"load folder": functools.partial(work.load, folder)}
    handlers |= {f"read {n}": functools.partial(work.read, n) for n in (128, 1024, 4096)}
    handlers |= {f"decode {n}": functools.partial(work.decode, n) for n in (1, 8)}
    serve(facts, handlers)


if __name__ == "__main__":
    main()
