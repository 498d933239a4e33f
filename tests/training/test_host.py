"""Programs on the host: items are computed once, kept, and resumed."""

import json
import signal

import jax
import numpy as np
import pytest
from etils import epath

from jaxlab.errors import InterruptedRun, UserError
from jaxlab.training import host
from jaxlab.training.host import HostProgram, drive_host, measure_program
from tests.training.toy import Silent


def counting_program(calls, *, items=3, fingerprint="data", prepared=None, **changes):
    """Two trials whose items are simple numbers, with a NaN among them."""

    def item(trial, seed, index):
        calls.append((trial, seed, index))
        value = np.float32(100 * trial + 10 * seed + index)
        return {"value": value, "row": np.array([value, np.nan]), "right": index == 1}

    def prepare():
        if prepared is not None:
            prepared.append(True)
        return item

    return HostProgram("count", 2, items, prepare, fingerprint, **changes)


def test_arrays_have_the_axes_trial_replicate_item():
    outcome = drive_host(counting_program([]), [1, 2], observer=Silent())
    assert outcome.arrays["value"].shape == (2, 2, 3)
    assert outcome.arrays["row"].shape == (2, 2, 3, 2)
    assert outcome.arrays["value"][1, 1, 2] == 122
    assert np.isnan(outcome.arrays["row"][..., 1]).all()
    assert outcome.arrays["right"].dtype == bool
    assert outcome.examples == 12


def test_finished_items_are_not_computed_again(tmp_path):
    folder, calls, prepared = epath.Path(tmp_path), [], []
    first = drive_host(counting_program(calls), [1, 2], observer=Silent(), folder=folder)
    assert len(calls) == 12
    again = drive_host(
        counting_program(calls, prepared=prepared), [1, 2], observer=Silent(), folder=folder
    )
    assert len(calls) == 12
    assert not prepared, "what is large is not loaded for nothing"
    for name, value in first.arrays.items():
        np.testing.assert_array_equal(value, again.arrays[name])
        assert value.dtype == again.arrays[name].dtype
    more = drive_host(counting_program(calls), [1, 2, 3], observer=Silent(), folder=folder)
    assert len(calls) == 18
    assert more.arrays["value"].shape == (2, 3, 3)


def test_a_stop_keeps_what_is_done(tmp_path):
    folder, calls = epath.Path(tmp_path), []

    def stop():
        return signal.SIGTERM if len(calls) == 5 else None

    with pytest.raises(InterruptedRun, match="item 6; run the same command to resume"):
        drive_host(counting_program(calls), [1, 2], observer=Silent(), folder=folder, stop=stop)
    resumed = drive_host(counting_program(calls), [1, 2], observer=Silent(), folder=folder)
    assert sorted(calls) == sorted(set(calls)), "no item twice"
    whole = drive_host(counting_program([]), [1, 2], observer=Silent())
    np.testing.assert_array_equal(resumed.arrays["row"], whole.arrays["row"])


def test_results_are_saved_from_time_to_time(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_SAVE_SECONDS", 0.0)
    folder = epath.Path(tmp_path)

    def prepare():
        def item(trial, seed, index):
            if index == 2:
                raise RuntimeError("the judge died")
            return {"value": index}

        return item

    with pytest.raises(RuntimeError):
        drive_host(HostProgram("count", 1, 3, prepare), [1], observer=Silent(), folder=folder)
    assert len(list((folder / "count").glob("items-*.json"))) == 2


def test_a_damaged_file_is_computed_again(tmp_path):
    folder, calls = epath.Path(tmp_path), []
    drive_host(counting_program(calls), [1], observer=Silent(), folder=folder)
    (file,) = (folder / "count").glob("items-*.json")
    file.write_text(file.read_text()[:-20])
    outcome = drive_host(counting_program(calls), [1], observer=Silent(), folder=folder)
    assert len(calls) == 12
    assert outcome.arrays["value"].shape == (2, 1, 3)


def test_other_data_are_refused(tmp_path):
    folder = epath.Path(tmp_path)
    drive_host(counting_program([]), [1], observer=Silent(), folder=folder)
    with pytest.raises(UserError, match=r"^data=other: the run was started on other data \(data\)"):
        drive_host(counting_program([], fingerprint="other"), [1], observer=Silent(), folder=folder)


def test_the_files_hold_valid_records(tmp_path):
    folder = epath.Path(tmp_path)
    drive_host(counting_program([]), [1], observer=Silent(), folder=folder)
    (file,) = (folder / "count").glob("items-*.json")
    record = json.loads(file.read_text())
    assert len(record["items"]) == 6
    assert not list((folder / "count").glob("*.tmp"))


def test_items_must_agree_in_shape():
    program = HostProgram("odd", 1, 2, lambda: lambda t, s, i: {"value": np.zeros(i + 1)})
    with pytest.raises(ValueError, match="items differ"):
        drive_host(program, [0], observer=Silent())
    with pytest.raises(ValueError, match="num_items=0"):
        counting_program([], items=0)


def test_whatever_ends_a_run_keeps_its_items(tmp_path):
    folder = epath.Path(tmp_path)

    def prepare():
        def item(trial, seed, index):
            if index == 2:
                raise UserError("judge.base_url", "http://x", "cannot be reached")
            return {"value": index}

        return item

    with pytest.raises(UserError, match="cannot be reached"):
        drive_host(HostProgram("ask", 1, 3, prepare), [1], observer=Silent(), folder=folder)
    (file,) = (folder / "ask").glob("items-*.json")
    assert [item[2] for item in json.loads(file.read_text())["items"]] == [0, 1]


def test_items_may_hold_texts(tmp_path):
    def item(trial, seed, index):
        return {"texts": np.array(["a", "é" * (index + 1)])}

    program = HostProgram("texts", 1, 2, lambda: item)
    folder = epath.Path(tmp_path)
    for _ in range(2):  # computed, then read back
        found = drive_host(program, [0], observer=Silent(), folder=folder).arrays["texts"]
        assert found.tolist() == [[[["a", "é"], ["a", "éé"]]]]


def test_a_measurement_is_compiled_once_and_has_no_axis_of_items():
    traces = []

    def measure(trial, key):
        traces.append(trial)
        return {"value": trial["scale"] * jax.random.normal(key, (3,))}

    trials = {"scale": np.array([1.0, 2.0], np.float32)}
    program = measure_program("normal", trials, measure, examples=3)
    outcome = drive_host(program, [7, 8, 9], observer=Silent())
    assert len(traces) == 1
    assert outcome.arrays["value"].shape == (2, 3, 3)
    assert outcome.examples == 18
    expected = jax.random.normal(jax.random.key(8), (3,))
    np.testing.assert_allclose(outcome.arrays["value"][1, 1], 2 * np.asarray(expected), rtol=1e-6)
