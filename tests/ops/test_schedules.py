"""Learning-rate schedules: reference values, agreement of host and graph, errors."""

from __future__ import annotations

import math
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.ops.schedules import SCHEDULES, make_schedule, schedule_values

GOLDEN = Path(__file__).parents[1] / "golden" / "trec_ema_coefficients.npz"
STEPS, WARMUP = 60, 6
ALL = {name: 0.0 if name == "d2z" else 0.1 for name in SCHEDULES}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def golden_cases(golden):
    settings_ = {
        "step_at": float(golden["step_at"]),
        "decay_fraction": float(golden["decay_frac"]),
        "num_cycles": int(golden["n_cycles"]),
    }
    positional = (int(golden["T"]), float(golden["eta"]), int(golden["warmup"]))
    for kind, ratio in zip(golden["kinds"], golden["final_ratio"], strict=True):
        args = (str(kind), *positional, float(ratio))
        yield args, settings_, golden[f"lr_{kind}_r{ratio}"]


def test_matches_reference_in_float64(golden):
    for args, options, expected in golden_cases(golden):
        np.testing.assert_allclose(schedule_values(*args, **options), expected, rtol=1e-10)
        with jax.enable_x64(True):
            in_graph = jnp.asarray(make_schedule(*args, **options)(jnp.arange(len(expected))))
            assert in_graph.dtype == jnp.float64
            np.testing.assert_allclose(in_graph, expected, rtol=1e-10, atol=1e-18)


def test_matches_reference_in_float32(golden):
    for args, options, expected in golden_cases(golden):
        in_graph = jnp.asarray(make_schedule(*args, **options)(jnp.arange(len(expected))))
        assert in_graph.dtype == jnp.float32
        np.testing.assert_allclose(in_graph, expected, rtol=2e-4, atol=1e-7)


def test_every_name_has_a_reference(golden):
    assert set(golden["kinds"]) | {"d2z"} == set(SCHEDULES)


class GraphTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)  # pyright: ignore
    @parameterized.parameters(*SCHEDULES)
    def test_scalar_and_array_counts_agree_with_the_host(self, name):
        schedule = make_schedule(name, STEPS, 0.01, WARMUP, ALL[name])
        expected = schedule_values(name, STEPS, 0.01, WARMUP, ALL[name])
        counts = jnp.arange(STEPS, dtype=jnp.int32).reshape(3, 20)
        values = self.variant(schedule)(counts)
        chex.assert_shape(values, (3, 20))
        np.testing.assert_allclose(values.ravel(), expected, rtol=2e-6, atol=1e-9)
        for count in (0, WARMUP, STEPS - 1):
            value = self.variant(schedule)(jnp.int32(count))
            np.testing.assert_allclose(value, expected[count], rtol=2e-6, atol=1e-9)


def test_peak_may_be_traced_and_mapped():
    peaks = jnp.asarray([0.1, 0.2, 0.4])

    @jax.jit
    @jax.vmap
    def values(peak):
        return make_schedule("cosine", STEPS, peak, WARMUP, 0.1)(jnp.arange(STEPS))

    expected = np.stack([schedule_values("cosine", STEPS, p, WARMUP, 0.1) for p in (0.1, 0.2, 0.4)])
    np.testing.assert_allclose(values(peaks), expected, rtol=2e-6)
    slope = jax.grad(lambda peak: make_schedule("linear", 10, peak)(4))(0.3)
    np.testing.assert_allclose(slope, 0.5, rtol=1e-6)


def test_first_and_last_steps():
    for name in SCHEDULES:
        values = schedule_values(name, STEPS, 2.0, WARMUP, ALL[name])
        np.testing.assert_allclose(values[:WARMUP], 2.0 * np.arange(1, WARMUP + 1) / WARMUP)
    assert schedule_values("d2z", STEPS, 2.0, WARMUP)[-1] == 0
    assert schedule_values("cosine", STEPS, 2.0, WARMUP)[-1] == 0
    assert make_schedule("cosine", STEPS, 2.0, WARMUP)(STEPS - 1) == 0
    np.testing.assert_allclose(schedule_values("cyclic", STEPS, 2.0, WARMUP)[-1], 2.0)


def test_last_value_is_held():
    for name in SCHEDULES:
        schedule = make_schedule(name, STEPS, 2.0, WARMUP, ALL[name])
        np.testing.assert_array_equal(schedule(STEPS + 100), schedule(STEPS - 1))


@pytest.mark.parametrize("num_steps", [10, 90, 170, 360, 3000])
def test_step_drops_after_an_exact_share(num_steps):
    values = schedule_values("step", num_steps, 1.0, final_ratio=0.5, step_at=0.7)
    assert int((values == 1.0).sum()) == num_steps * 7 // 10


def test_step_drops_at_the_same_step_in_graph():
    values = schedule_values("step", 90, 1.0, final_ratio=0.5, step_at=0.7)
    in_graph = make_schedule("step", 90, 1.0, final_ratio=0.5, step_at=0.7)
    np.testing.assert_array_equal(in_graph(jnp.arange(90)), values)


def test_without_warmup_decay_starts_at_once():
    values = schedule_values("linear", 10, 1.0)
    np.testing.assert_allclose(values, 1 - np.arange(1, 11) / 10, atol=1e-15)


def test_drives_an_optax_optimizer():
    schedule = make_schedule("d2z", 4, 1.0)
    optimizer = optax.scale_by_learning_rate(schedule)
    state = optimizer.init(jnp.ones(2))
    applied = []
    for _ in range(4):
        updates, state = optimizer.update(jnp.ones(2), state)
        applied.append(-np.asarray(updates))
    expected = np.repeat(schedule_values("d2z", 4, 1.0)[:, None], 2, axis=1)
    np.testing.assert_allclose(applied, expected)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from([name for name in SCHEDULES if name != "d2z"]),
    peak=st.floats(1e-6, 10),
    warmup=st.integers(1, STEPS // 2),
    ratio=st.floats(0, 1),
)
def test_stays_between_zero_and_the_peak(name, peak, warmup, ratio):
    values = schedule_values(name, STEPS, peak, warmup, ratio)
    assert values.shape == (STEPS,)
    assert values.dtype == np.float64
    assert (values >= 0).all()
    assert (values <= peak * (1 + 1e-12)).all()
    assert values[warmup - 1] == pytest.approx(peak)
    lowest = min(ratio, 1 / warmup, math.sqrt(warmup / STEPS) if name == "inverse_sqrt" else 1)
    assert values.min() >= peak * lowest * (1 - 1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "cosin"}, r"name='cosin': must be one of constant.*did you mean 'cosine'\?"),
        ({"name": "zzz"}, r"name='zzz': must be one of constant, linear, d2z, .*cyclic$"),
        ({"num_steps": 0}, r"num_steps=0: must be at least 1"),
        ({"warmup_steps": 100}, r"warmup_steps=100: must be at least 0 and below num_steps=100"),
        ({"warmup_steps": -1}, r"warmup_steps=-1: must be at least 0"),
        ({"name": "inverse_sqrt"}, r"warmup_steps=0: must be at least 1"),
        ({"final_ratio": 1.5}, r"final_ratio=1\.5: must lie in \[0, 1\]"),
        ({"final_ratio": math.nan}, r"final_ratio=nan: must lie in"),
        ({"step_at": -0.1}, r"step_at=-0\.1: must lie in \[0, 1\]"),
        ({"decay_fraction": 0.0}, r"decay_fraction=0\.0: must lie in \(0, 1\]"),
        ({"num_cycles": 0}, r"num_cycles=0: must be at least 1"),
        ({"peak_lr": 0.0}, r"peak_lr=0\.0: must be positive"),
        ({"peak_lr": math.inf}, r"peak_lr=inf: must be positive and finite"),
        ({"name": "d2z", "final_ratio": 0.1}, r"final_ratio=0\.1: must be 0 with name='d2z'"),
        (
            {"name": "wsd", "warmup_steps": 10, "decay_fraction": 0.95},
            r"decay_fraction=0\.95: must be at most 0\.9",
        ),
    ],
)
@pytest.mark.parametrize("function", [make_schedule, schedule_values])
def test_misuse_names_argument_value_and_range(function, kwargs, message):
    arguments = {"name": "linear", "num_steps": 100, "peak_lr": 0.1} | kwargs
    with pytest.raises(ValueError, match=message):
        function(**arguments)
