"""AdamW against its closed form, and the train step around it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.training.optimizers import adamw, decay_matrices, init_state, make_train_step


def numpy_adamw(theta, grads, lrs, decay, b1, b2, eps):
    """The textbook recursion in float64."""
    m = v = np.zeros_like(theta)
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        theta = theta - lr * (update + decay * theta)
    return theta


def test_adamw_is_the_textbook_recursion():
    draw = np.random.default_rng(0)
    grads, lrs = draw.normal(size=(20, 5)), np.linspace(0.1, 0.01, 20)
    theta = draw.normal(size=5)
    with jax.enable_x64(True):
        rates = jnp.asarray(lrs)
        tx = adamw(lambda count: rates[count], 0.3, b1=0.8, b2=0.9, eps=1e-6)
        params = {"w": jnp.asarray(theta)}
        with jax.numpy_dtype_promotion("standard"):
            state = tx.init(params)
            for g in grads:
                found: Any = tx.update({"w": jnp.asarray(g)}, state, params)
                updates, state = found
                params = {"w": params["w"] + updates["w"]}
        expected = numpy_adamw(theta, grads, lrs, 0.3, 0.8, 0.9, 1e-6)
        np.testing.assert_allclose(params["w"], expected, rtol=1e-12)


def test_decay_reaches_matrices_only():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    tx = adamw(lambda count: jnp.float32(0.1), 0.5, weight_decay_mask=decay_matrices)
    with jax.numpy_dtype_promotion("standard"):
        zero = jax.tree.map(jnp.zeros_like, params)
        updates: Any = tx.update(zero, tx.init(params), params)[0]
    np.testing.assert_allclose(updates["kernel"], -0.05 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], np.zeros(2))


def test_clipping_bounds_the_first_moment():
    params = {"w": jnp.zeros(4)}
    tx = adamw(lambda count: jnp.float32(1.0), 0.0, clip_norm=1.0, b1=0.0, b2=0.0, eps=1.0)
    with jax.numpy_dtype_promotion("standard"):
        updates: Any = tx.update({"w": jnp.full(4, 100.0)}, tx.init(params), params)[0]
    # Clipped to 0.5 each: update = g / (|g| + 1).
    np.testing.assert_allclose(updates["w"], np.full(4, -0.5 / 1.5), rtol=1e-6)


def quadratic(params, batch, key):
    """Half the squared distance, plus noise that reveals the key."""
    return 0.5 * jnp.sum((params - batch) ** 2) + 0.0 * jax.random.normal(key)


def test_train_step_counts_and_reports():
    step = make_train_step(quadratic, lambda trial: adamw(lambda c: trial["lr"], 0.0))
    trial = {"lr": jnp.float32(0.1)}
    state = init_state(jnp.array([3.0, 4.0]), adamw(lambda c: 0.1, 0.0), jax.random.key(1))
    new, metrics = jax.jit(step)(trial, state, jnp.zeros(2))
    assert int(new.step) == 1
    assert float(metrics["loss"]) == pytest.approx(12.5)
    assert float(metrics["grad_norm"]) == pytest.approx(5.0)
    np.testing.assert_allclose(new.params, [2.9, 3.9], rtol=1e-5)


def test_each_step_has_a_key_of_its_own():
    seen = []

    def loss_fn(params, batch, key):
        seen.append(jax.random.key_data(key).tolist())
        return jnp.sum(params)

    step = make_train_step(loss_fn, lambda trial: adamw(lambda c: 0.1, 0.0))
    state = init_state(jnp.zeros(1), adamw(lambda c: 0.1, 0.0), jax.random.key(3))
    for _ in range(3):
        state, _ = step(None, state, None)
    expected = [jax.random.fold_in(jax.random.key(3), t) for t in range(3)]
    assert seen == [jax.random.key_data(key).tolist() for key in expected]


def regression(params, batch, key):
    """A mean over examples, so that parts of equal size weigh the same."""
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulated_parts_are_the_whole_batch(parts):
    draw = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(draw.normal(size=(8, 3)), jnp.float32),
        "y": jnp.asarray(draw.normal(size=8), jnp.float32),
    }

    def optimizer(trial):
        return adamw(lambda count: jnp.float32(0.1), 0.01)

    params = {"w": jnp.ones(3)}
    results = []
    for accumulate in (1, parts):
        step = jax.jit(make_train_step(regression, optimizer, accumulate=accumulate))
        state = init_state(params, optimizer(None), jax.random.key(0))
        for _ in range(3):
            state, metrics = step(None, state, batch)
        results.append((state.params["w"], metrics["loss"], metrics["grad_norm"]))
    for whole, accumulated in zip(*results, strict=True):
        np.testing.assert_allclose(accumulated, whole, rtol=1e-5)


def test_the_average_is_the_recursion():
    def optimizer(trial):
        return adamw(lambda count: jnp.float32(0.1), 0.0)

    step = make_train_step(quadratic, optimizer, ema_decay=0.9)
    state = init_state(jnp.array([3.0, 4.0]), optimizer(None), jax.random.key(0), average=True)
    expected = np.array([3.0, 4.0])
    for _ in range(4):
        state, _ = step(None, state, jnp.zeros(2))
        expected = 0.9 * expected + 0.1 * np.asarray(state.params)
    np.testing.assert_allclose(state.ema, expected, rtol=1e-6)


def test_half_precision_computation_keeps_float32_masters():
    """Updates far below a bfloat16's resolution still add up in the parameters."""

    def loss_fn(params, batch, key):
        return jnp.sum(params["w"].astype(jnp.bfloat16).astype(jnp.float32))

    def optimizer(trial):
        return adamw(lambda count: jnp.float32(1e-5), 0.0)

    step = jax.jit(make_train_step(loss_fn, optimizer))
    state = init_state({"w": jnp.ones(2)}, optimizer(None), jax.random.key(0))
    for _ in range(100):
        state, _ = step(None, state, None)
    assert state.params["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.params["w"], np.full(2, 1 - 100e-5), atol=2e-5)
