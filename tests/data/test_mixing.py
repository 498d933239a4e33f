import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data.batches import EndlessBatches
from jaxlab.data.mixing import MixedBatches, read_mixture, weights_to_ids
from jaxlab.data.windows import WindowBatches
from jaxlab.errors import UserError


class Labelled(EndlessBatches[dict[str, np.ndarray]]):
    """A source whose batches tell where they come from."""

    def __init__(self, name: int) -> None:
        self.name = name

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return {"origin": np.array([self.name, step])}


def windows() -> list[WindowBatches]:
    tokens = np.random.default_rng(0).integers(0, 256, 700).astype(np.uint8)
    return [
        WindowBatches(tokens[begin : begin + 300], batch_size=4, context=7, seed=seed)
        for seed, begin in enumerate((0, 200, 400))
    ]


def same(first, second) -> bool:
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


IDS = weights_to_ids([2, 1, 3], 120, seed=4)


def test_each_source_is_read_as_if_it_were_alone():
    mixed, sources = MixedBatches(windows(), IDS), windows()
    for source in range(3):
        steps = np.flatnonzero(np.equal(IDS, source))
        assert len(steps) > 10
        for index, step in enumerate(steps):
            assert same(mixed[step], sources[source][index])


def test_steps_may_be_replayed_in_any_order():
    expected = [MixedBatches(windows(), IDS)[step] for step in range(len(IDS))]
    mixed = MixedBatches(windows(), IDS)
    for step in np.random.default_rng(1).integers(0, len(IDS), 300):
        assert same(mixed[step], expected[step])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_the_index_counts_the_earlier_steps_of_the_source(ids):
    mixed = MixedBatches([Labelled(name) for name in range(4)], np.array(ids))
    for step in reversed(range(len(ids))):
        assert mixed[step]["origin"].tolist() == [ids[step], ids[:step].count(ids[step])]


def test_a_mixture_ends():
    mixed = MixedBatches(windows(), IDS)
    assert len(mixed) == 120
    for step in (120, 10**12):
        with pytest.raises(IndexError, match=f"step={step}: the mixture has 120 steps"):
            mixed[step]
    with pytest.raises(IndexError, match="step=-1"):
        mixed[-1]
    found = list(mixed.dataset().to_iter_dataset())
    assert len(found) == 120
    assert same(found[119], mixed[119])


def test_sources_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"source_ids\[1\]=3: must be in \[0, 3\)"):
        MixedBatches(windows(), np.array([0, 3]))
    with pytest.raises(ValueError, match=r"source_ids\[0\]=-1"):
        MixedBatches(windows(), np.array([-1, 0]))
    with pytest.raises(ValueError, match=r"source_ids\[0\]=0"):
        MixedBatches([], np.array([0]))
    with pytest.raises(TypeError, match="float64"):
        MixedBatches(windows(), np.array([0.0]))
    with pytest.raises(ValueError, match="one row"):
        MixedBatches(windows(), np.zeros((2, 2), int))


def test_ids_of_the_caller_are_not_kept():
    ids = np.array([0, 0, 1])
    mixed = MixedBatches([Labelled(0), Labelled(1)], ids)
    ids[:] = 1
    assert mixed[1]["origin"].tolist() == [0, 1]


def test_drawn_counts_follow_the_weights():
    weights, steps = np.array([0.5, 0.0, 0.3, 0.19, 0.01]), 20_000
    ids = weights_to_ids(weights * 7, steps, seed=11)
    assert ids.dtype == np.uint8
    counts = np.bincount(ids, minlength=5)
    # Five standard deviations of four counts: with another seed it would fail with a chance of
    # about 3e-6.
    assert (np.abs(counts - steps * weights) <= 5 * np.sqrt(steps * weights * (1 - weights))).all()


def test_draws_depend_on_the_seed_and_are_appended():
    ids = weights_to_ids([1, 2], 1000, seed=3)
    np.testing.assert_array_equal(ids, weights_to_ids([1, 2], 1000, seed=3))
    np.testing.assert_array_equal(ids[:400], weights_to_ids([1, 2], 400, seed=3))
    assert (ids != weights_to_ids([1, 2], 1000, seed=4)).any()


def test_a_source_without_weight_is_never_drawn():
    assert set(weights_to_ids([0, 1, 0, 0.1, 0, 0], 5000, seed=0).tolist()) == {1, 3}


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, np.nan], [1, np.inf], [[1]]])
def test_weights_out_of_range_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        weights_to_ids(weights, 10, seed=0)


def test_other_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="num_steps=-1"):
        weights_to_ids([1], -1, seed=0)
    with pytest.raises(ValueError, match="seed=-1"):
        weights_to_ids([1], 1, seed=-1)


GOOD = {"num_steps": 10, "segments": [[6, 8, 2], [1, 3, 1], [3, 4, 2]], "default": 0}


def read(tmp_path, content, **options):
    path = tmp_path / "mixture.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_mixture(path, **options)


def test_a_mixture_is_read_from_its_segments(tmp_path):
    ids = read(tmp_path, GOOD, num_sources=3)
    assert ids.tolist() == [0, 1, 1, 2, 0, 0, 2, 2, 0, 0]
    assert ids.dtype == np.uint8
    mixed = MixedBatches([Labelled(name) for name in range(3)], ids)
    assert mixed[7]["origin"].tolist() == [2, 2]
    assert read(tmp_path, {**GOOD, "segments": []}).tolist() == [0] * 10


def test_the_default_may_be_missing_where_segments_cover_all(tmp_path):
    whole = {"num_steps": 5, "segments": [[3, 5, 1], [0, 3, 300]]}
    assert read(tmp_path, whole).tolist() == [300, 300, 300, 1, 1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON .line 1 column 2: "),
        ('{"num_steps": 1\n "segments"', "is not JSON .line 2 column 2: "),
        ("[1, 2]", "must hold an object with the keys num_steps and segments"),
        ({"segments": [], "default": 0}, "the key num_steps is missing"),
        ({"num_steps": 3, "default": 0}, "the key segments is missing"),
        (
            {"num_steps": 3, "segments": [[1, 3, 0]]},
            "default is missing, .* cover 2 of 3",
        ),
        ({**GOOD, "defualt": 0}, "unknown key 'defualt'; allowed: num_steps, segments, default"),
        ({**GOOD, "num_steps": 0}, "num_steps is 0: must be a whole number in"),
        ({**GOOD, "num_steps": 10**12}, "num_steps is 1000000000000: must be"),
        ({**GOOD, "num_steps": 10.0}, "num_steps is 10.0: must be"),
        ({**GOOD, "num_steps": True}, "num_steps is True: must be"),
        ({**GOOD, "segments": {"1": 2}}, "segments is .*: must be a list"),
        ({**GOOD, "segments": [[0, 1]]}, r"segments\[0\] is \[0, 1\]: must be \[start, stop, sour"),
        ({**GOOD, "segments": [[0, 1, "a\nb"]]}, r"segments\[0\] is \[0, 1, 'a\\nb'\]: must be"),
        ({**GOOD, "segments": [[0, 1, 0], 3]}, r"segments\[1\] is 3: must be"),
        ({**GOOD, "segments": [[8, 11, 1]]}, r"\[8, 11, 1\]: needs 0 <= start < stop <= num_steps"),
        ({**GOOD, "segments": [[-1, 2, 1]]}, r"\[-1, 2, 1\]: needs 0 <= start"),
        ({**GOOD, "segments": [[2, 2, 1]]}, r"\[2, 2, 1\]: needs 0 <= start < stop"),
        ({**GOOD, "segments": [[5, 8, 1], [1, 6, 2]]}, r"\[1, 6, 2\] and \[5, 8, 1\] overlap"),
        ({**GOOD, "segments": [[5, 8, 1], [5, 8, 1]]}, r"\[5, 8, 1\] and \[5, 8, 1\] overlap"),
        ({**GOOD, "segments": [[0, 1, 3]]}, r"\[0, 1, 3\], names source 3: must be .* \[0, 3\)"),
        ({**GOOD, "segments": [[0, 1, -1]]}, "names source -1: must be"),
        ({**GOOD, "default": 3}, r"default names source 3: must be a whole number in \[0, 3\)"),
        ({**GOOD, "default": "web"}, "default names source 'web': must be"),
    ],
    ids=itertools.count(),
)
def test_a_bad_mixture_is_refused_in_one_line(tmp_path, content, problem):
    with pytest.raises(UserError, match=problem) as caught:
        read(tmp_path, content, num_sources=3)
    assert str(caught.value).startswith(f"data.mixture={tmp_path / 'mixture.json'}: ")
    assert "\n" not in str(caught.value)


def test_a_source_is_checked_without_their_number_too(tmp_path):
    with pytest.raises(UserError, match="names source -1"):
        read(tmp_path, {**GOOD, "default": -1})
    with pytest.raises(UserError, match=r"must be a whole number in \[0, 65536\)"):
        read(tmp_path, {**GOOD, "default": 10**20})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none.json: cannot be read \(No such file"):
        read_mixture(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"num_steps": "\xe9"}')
    with pytest.raises(UserError, match="is not JSON in UTF-8"):
        read_mixture(tmp_path / "latin.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        read_mixture(tmp_path / "deep.json")
