"""A program that trains in milliseconds: linear regression on data made from (seed, step)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.training.optimizers import adamw, init_state, make_train_step
from jaxlab.training.program import Evaluation, Program


def toy_batch(seed: int, step: int) -> dict[str, np.ndarray]:
    """Eight noisy linear observations."""
    draw = np.random.default_rng([seed, step])
    x = draw.normal(size=(8, 4)).astype(np.float32)
    y = (x @ np.arange(1.0, 5.0) + 0.1 * draw.normal(size=8)).astype(np.float32)
    return {"x": x, "y": y}


def next_replicate(replicate: int, replicates: int) -> int:
    """The next one; the last one's is the first."""
    return (replicate + 1) % replicates


def toy_program(num_steps: int = 30, rates=(0.05,), *, nan_at: int | None = None, **changes):
    """A `Program` with one validation during training and a replay with a peer after it."""

    def loss_fn(params, batch, key):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    def optimizer(trial):
        return adamw(lambda count: trial["rate"][count], 0.01, clip_norm=1.0)

    def init(trial, key):
        params = {"w": jax.random.normal(key, (4,), jnp.float32)}
        return init_state(params, optimizer(trial), key)

    def validate(trial, state, batch):
        return {"loss": loss_fn(state.params, batch, None)}

    def replay(trial, state, peer, batch):
        loss = loss_fn(state.params, batch, None)
        return {"loss": loss, "gap": loss - loss_fn(peer.params, batch, None)}

    def batches(trial, seed, step):
        batch = toy_batch(seed, step)
        if nan_at == step:
            batch["y"] = np.full_like(batch["y"], np.nan)
        return batch

    rate = np.array([[r] * num_steps for r in rates], np.float32)
    program = Program(
        name="toy",
        trials={"rate": rate},
        num_steps=num_steps,
        init=init,
        step=make_train_step(loss_fn, optimizer),
        batches=batches,
        evaluations={
            "validation": Evaluation(validate, lambda t, s, i: toy_batch(10_000, i), 3, every=10),
            "replay": Evaluation(replay, batches, num_steps, keep="each", peer=next_replicate),
        },
        summarize=lambda trial, state: {"w": state.params["w"]},
        best="validation/loss",
        examples_per_step=8,
        fingerprint="toy",
    )
    return dataclasses.replace(program, **changes)


class Silent:
    """Records what a driver reports."""

    def __init__(self):
        self.lines: list[tuple[int, dict]] = []
        self.phases: list[tuple[str, int | None, int]] = []

    def begin(self, phase):
        self.phases.append((phase.name, phase.done, phase.total))

    def advance(self, done, loss, compile_seconds):
        pass

    def metrics(self, step, values):
        self.lines.append((step, values))
