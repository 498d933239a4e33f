"""Programs: what they refuse, how they merge, and when they may go on."""

import dataclasses

import numpy as np
import pytest

from jaxlab.errors import UserError
from jaxlab.training.program import Evaluation, check_extension, merge_trials
from tests.training.toy import toy_batch, toy_program


def test_trials_need_one_leading_axis():
    with pytest.raises(ValueError, match="same leading trial axis"):
        dataclasses.replace(toy_program(), trials={"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="num_steps=0"):
        dataclasses.replace(toy_program(), num_steps=0)
    with pytest.raises(ValueError, match="best=test/loss"):
        dataclasses.replace(toy_program(), best="test/loss")


def test_evaluations_check_their_numbers():
    with pytest.raises(ValueError, match="num_batches=0"):
        Evaluation(lambda *a: {}, lambda *a: None, 0)
    with pytest.raises(ValueError, match="every=None"):
        Evaluation(lambda *a: {}, lambda *a: None, 1, every=5, peer=lambda r, n: 0)


def test_merged_trials_read_their_own_batches():
    other = dataclasses.replace(
        toy_program(rates=(0.2,)), batches=lambda trial, seed, step: toy_batch(seed + 50, step)
    )
    merged = merge_trials([toy_program(rates=(0.05, 0.1)), other])
    assert merged.num_trials == 3
    np.testing.assert_array_equal(
        merged.trials["rate"][:, 0], np.array([0.05, 0.1, 0.2], np.float32)
    )
    np.testing.assert_array_equal(merged.batches(1, 7, 3)["x"], toy_batch(7, 3)["x"])
    np.testing.assert_array_equal(merged.batches(2, 7, 3)["x"], toy_batch(57, 3)["x"])


def test_programs_of_other_structure_do_not_merge():
    with pytest.raises(ValueError, match="differ in structure"):
        merge_trials([toy_program(30), toy_program(40)])


def test_extension_needs_the_same_beginning():
    check_extension(toy_program(30), toy_program(40))
    with pytest.raises(UserError, match=r"steps=40: .*its schedule would have differed"):
        check_extension(toy_program(30), toy_program(40, rates=(0.1,)))
    with pytest.raises(UserError, match=r"steps=20: .*more steps, not fewer"):
        check_extension(toy_program(30), toy_program(20))
