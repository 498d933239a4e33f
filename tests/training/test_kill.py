"""SIGKILL at random moments: a short form of `kill_and_resume`."""

import pytest

from tests.training.kill_and_resume import kill_and_resume


def test_two_kills_change_nothing(tmp_path, monkeypatch, cache_folder):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache_folder))
    assert len(kill_and_resume(tmp_path, kills=2, seed=1)) == 2


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path, monkeypatch, cache_folder):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache_folder))
    assert len(kill_and_resume(tmp_path, kills=20, seed=2)) == 20
