"""A traced field changes a trial's arrays alone: else trials could not share a program."""

import dataclasses
from typing import Any, get_args

import jax
import numpy as np
import pytest

from jaxlab.experiments.base import config_fields, flatten, to_dict
from jaxlab.experiments.composition import validate
from jaxlab.experiments.registry import METHODS, config_class, experiment_module
from jaxlab.training.program import Program, merge_trials

CASES = [
    (slug, variant, name)
    for slug, entry in METHODS.items()
    for variant in entry.variants
    for name, info in config_fields(config_class(slug, variant)).items()
    if info.traced
]


def settings(slug: str, variant: str) -> dict[str, Any]:
    """The smallest preset's settings, nested."""
    from jaxlab.experiments.composition import make_config

    return to_dict(make_config(slug, variant=variant, preset="test"))


def changed(tree: dict[str, Any], name: str, annotation: Any) -> dict[str, Any]:
    """The settings with another value for one field, and what that needs of others."""
    value = flatten(tree)[name]
    if isinstance(value, str):
        others = [choice for choice in get_args(annotation) if choice != value]
        value = others[0]
    elif isinstance(value, int):
        value = value + 1
    else:
        value = value * 0.75 if value else 0.25
    *path, leaf = name.split(".")
    node = tree
    for part in path:
        node = node[part]
    node[leaf] = value
    if name == "optimizer.final_ratio":  # d2z has none
        node["schedule"] = "linear"
    return tree


def computation(program: Program) -> tuple[str, list[np.ndarray]]:
    """The step and the initialisation as they would be compiled, with their constants."""
    trial = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), program.trials
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    traced = [
        jax.make_jaxpr(program.step)(trial, program.abstract_state(), program.batches(0, 0, 0)),
        jax.make_jaxpr(program.init)(trial, key),
    ]
    constants = [np.asarray(c) for t in traced for c in t.consts]
    return "\n".join(str(t.jaxpr) for t in traced), constants


@pytest.mark.parametrize(("slug", "variant", "name"), CASES)
def test_a_traced_field_changes_the_trial_alone(slug, variant, name):
    build = experiment_module(slug).build
    base = build(validate(slug, settings(slug, variant)))
    info = config_fields(config_class(slug, variant))[name]
    other = build(validate(slug, changed(settings(slug, variant), name, info.annotation)))
    for one, two in zip(base, other, strict=True):
        text_one, constants_one = computation(one)
        text_two, constants_two = computation(two)
        assert text_one == text_two
        for a, b in zip(constants_one, constants_two, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(one.batches(0, 5, 3), two.batches(0, 5, 3))
        assert merge_trials([one, two]).num_trials == one.num_trials + two.num_trials


def test_the_check_can_fail():
    """A step that closes over its setting is found out."""
    from tests.training.toy import toy_program

    def scaled(factor: float) -> Program:
        program = toy_program()

        def step(trial, state, batch):
            state, metrics = program.step(trial, state, batch)
            return state, {**metrics, "loss": factor * metrics["loss"]}

        return dataclasses.replace(program, step=step)

    assert computation(scaled(1.0))[0] != computation(scaled(2.0))[0]
