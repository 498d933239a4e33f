"""Worker of `benchmarks.training`: the same decoder and train step in PyTorch."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.training_sizes import Sizes
from benchmarks.workers import peak_memory, serve

_PEAK_SIZE = 2048
_HEAD_DIM = 64


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.num_heads, sizes.num_kv_heads
        width, kv_width = sizes.width, _HEAD_DIM * sizes.num_kv_heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, sizes.hidden_width, bias=False)
        self.up = nn.Linear(width, sizes.hidden_width, bias=False)
        self.down = nn.Linear(sizes.hidden_width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).view(batch, length, heads, _HEAD_DIM).transpose(1, 2)
            for layer, heads in (
                (self.query, self.heads),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        attended = F.scaled_dot_product_attention(
            _rotate(query, cos, sin),
            _rotate(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Model(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.unembedding = nn.Linear(sizes.width, sizes.vocab_size, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)
        angles = torch.arange(sizes.context)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.unembedding(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class _Work:
    """One decoder with its optimiser; bfloat16 by autocast on accelerators."""

    def __init__(self, sizes: Sizes, compiled: bool) -> None:
        self.sizes = sizes
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        model = _Model(sizes).to(self.device)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        self.parameters = [*matrices, *vectors]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.loss = torch.compile(model) if compiled else model
        shape = (sizes.steps, sizes.batch_size, sizes.context + 1)
        tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, shape, np.int64)
        self.batches = torch.from_numpy(tokens).to(self.device)

    def steps(self) -> dict[str, float]:
        """Steps one by one."""
        start = time.perf_counter()
        for batch in self.batches:
            self.optimizer.zero_grad(set_to_none=True)
            with self._precision():
                loss = self.loss(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
        self._wait()
        seconds = (time.perf_counter() - start) / self.sizes.steps
        return {"seconds": seconds, "memory": peak_memory()}

    def peak(self) -> dict[str, float]:
        """Rate of a large matrix product, in floating-point operations a second."""
        kind = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        left = torch.ones(_PEAK_SIZE, _PEAK_SIZE, dtype=kind, device=self.device)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            left @ left
            self._wait()
            seconds.append(time.perf_counter() - start)
        return {"rate": 2 * _PEAK_SIZE**3 / min(seconds)}

    def _precision(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Prepares the sizes and the mode given on the command line and answers."""
    if len(sys.argv) > 3:
        torch.set_num_threads(int(sys.argv[3]))
    work = _Work(Sizes(int(sys.argv[1])), compiled=sys.argv[2] == "compile")
    serve({"versions": f"torch {torch.__version__}"}, {"steps": work.steps, "peak": work.peak})


if __name__ == "__main__":
    main()
