"""Two processes compute what one does, stop together, and survive each other."""

import numpy as np
import pytest

from tests.parallel import two_processes as two


@pytest.fixture(scope="module")
def cache(cache_folder):
    return str(cache_folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache):
    """One process of eight devices, undisturbed."""
    folder = tmp_path_factory.mktemp("one") / "run"
    two.alone(folder, cache)
    return folder


def test_two_processes_compute_what_one_does(tmp_path, cache, one):
    with two.pair(tmp_path / "run", cache) as both:
        first, second = two.finish(both)
    assert [process.returncode for process in both] == [0, 0], first + second
    np.testing.assert_allclose(two.losses(tmp_path / "run"), two.losses(one), rtol=0, atol=1e-6)
    assert "trec.shape.text" in first
    assert "trec.shape.text" not in second  # process 0 speaks for all


def test_both_stop_by_one_signal_and_either_kind_resumes(tmp_path, cache, one):
    """SIGTERM to one of two: both save and leave; one process of eight devices goes on."""
    folder = tmp_path / "run"
    words = ("steps=400", "num_bins=20", "eval_every=400")
    assert two.terminate_one(folder, cache, *words) == [143, 143]
    assert "resuming after" in two.alone(folder, cache, *words)
    assert two.losses(folder).shape == (400, 2)


@pytest.mark.slow
def test_a_resumed_pair_is_bit_equal(tmp_path, cache):
    words = ("steps=400", "num_bins=20", "eval_every=400")
    assert two.terminate_one(tmp_path / "a", cache, *words) == [143, 143]
    for folder in ("a", "b"):
        with two.pair(tmp_path / folder, cache, *words) as both:
            two.finish(both)
        assert [process.returncode for process in both] == [0, 0]
    np.testing.assert_array_equal(two.losses(tmp_path / "a"), two.losses(tmp_path / "b"))


@pytest.mark.slow
def test_a_survivor_ends_and_the_pair_resumes(tmp_path, cache):
    """The heartbeat time-out is 10 seconds; nothing can be saved after a peer's death."""
    words = ("steps=400", "num_bins=20", "eval_every=400")
    seconds, code = two.kill_one(tmp_path / "run", cache, *words)
    assert code != 0
    assert seconds < 40
    with two.pair(tmp_path / "run", cache, *words) as both:
        first, second = two.finish(both)
    assert [process.returncode for process in both] == [0, 0], first + second
    assert "resuming after" in first


@pytest.mark.slow
def test_a_pair_goes_on_from_one_process(tmp_path, cache):
    """What one process of eight devices has trained, two of four restore, and add a replicate."""
    folder = tmp_path / "run"
    two.alone(folder, cache)
    with two.pair(folder, cache, "replicates=3") as both:
        first, second = two.finish(both)
    assert [process.returncode for process in both] == [0, 0], first + second
    assert "resuming after 40 of 40" in first
