"""Checkpoints: exact, newest and best kept, and damage noticed."""

import contextlib
import errno
import logging
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxlab.errors import StorageError, UserError
from jaxlab.training.checkpoints import CheckpointStore
from jaxlab.training.driver import DriveSettings, drive
from tests.training.toy import Silent, toy_program


def state_of(seed):
    key = jax.random.key(seed)
    return {
        "w": jax.random.normal(key, (64, 64), jnp.float32),
        "half": jax.random.normal(key, (7,), jnp.bfloat16),
        "count": jnp.int32(seed),
        "keys": jax.random.split(key, 3),
    }


def raw(tree):
    def plain(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(plain, tree)


HISTORY = {"train/loss": np.arange(8.0, dtype=np.float32).reshape(2, 4)}
ABSTRACT = jax.eval_shape(lambda: state_of(0))


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path) / "store"


def fill(folder, steps=(1, 2, 3), best=(None, None, None)):
    store = CheckpointStore(folder)
    for step, value in zip(steps, best, strict=True):
        store.save(step, state_of(step), HISTORY, {"note": f"at {step}"}, best=value)
    store.close()


def test_a_checkpoint_comes_back_exactly(folder):
    fill(folder)
    store = CheckpointStore(folder)
    restored = store.restore_newest(ABSTRACT)
    store.close()
    assert restored is not None
    assert (restored.step, restored.meta) == (3, {"note": "at 3"})
    jax.tree.map(np.testing.assert_array_equal, raw(restored.state), raw(state_of(3)))
    np.testing.assert_array_equal(restored.history["train/loss"], HISTORY["train/loss"])
    assert restored.history["train/loss"].dtype == np.float32


def test_an_empty_folder_has_none(folder):
    store = CheckpointStore(folder)
    assert store.restore_newest(ABSTRACT) is None
    store.close()


def test_the_newest_two_and_the_best_are_kept(folder):
    fill(folder, (1, 2, 3, 4, 5), (3.0, 1.0, 2.0, 5.0, 4.0))
    store = CheckpointStore(folder)
    assert store.steps() == [2, 4, 5]
    store.close()


def test_donated_buffers_do_not_reach_the_disk(folder):
    store = CheckpointStore(folder)
    state = state_of(1)
    expected = raw(state)
    change = jax.jit(lambda tree: {**tree, "w": tree["w"] * 2.0}, donate_argnums=0)
    store.save(1, state, HISTORY, {})
    change(state)
    store.wait()
    restored = store.restore_newest(ABSTRACT)
    store.close()
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, raw(restored.state), expected)


def largest_file(folder, item):
    files = [path for path in (folder / item).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def truncate(folder):
    file = largest_file(folder, "state")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(folder):
    largest_file(folder, "state").write_bytes(b"")


def flip_bit(folder):
    file = largest_file(folder, "state")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


def lose_state(folder):
    shutil.rmtree(folder / "state")


def lose_record(folder):
    shutil.rmtree(folder / "meta")


def garble_record(folder):
    file = largest_file(folder, "meta")
    file.write_text(file.read_text()[:-9])


def garble_metadata(folder):
    (folder / "state" / "_METADATA").write_text("")


DAMAGES = [truncate, empty, flip_bit, lose_state, lose_record, garble_record, garble_metadata]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_newest_checkpoint_is_passed_over(folder, tmp_path, damage):
    fill(folder)
    damage(tmp_path / "store" / "3")
    store = CheckpointStore(folder)
    with pytest.warns(UserWarning, match="checkpoint 3 in .* is damaged") as caught:
        restored = store.restore_newest(ABSTRACT)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert restored is not None
    assert restored.step == 2
    jax.tree.map(np.testing.assert_array_equal, raw(restored.state), raw(state_of(2)))
    store.save(3, state_of(33), HISTORY, {})
    store.wait()
    again = store.restore_newest(ABSTRACT)
    store.close()
    assert again is not None
    jax.tree.map(np.testing.assert_array_equal, raw(again.state), raw(state_of(33)))


def test_every_flipped_byte_of_the_data_is_noticed_or_harmless(folder, tmp_path):
    """Wherever a byte flips: the state comes back exactly, or not at all."""
    fill(folder, (1,), (None,))
    file = largest_file(tmp_path / "store" / "1", "state")
    whole, expected = file.read_bytes(), raw(state_of(1))
    outcomes = []
    for place in np.linspace(0, len(whole) - 1, 12).astype(int):
        copy = tmp_path / f"copy{place}"
        shutil.copytree(tmp_path / "store", copy)
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        (copy / file.relative_to(tmp_path / "store")).write_bytes(bytes(damaged))
        store = CheckpointStore(epath.Path(copy))
        restored = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(StorageError):
                restored = store.restore_newest(ABSTRACT)
        store.close()
        outcomes.append(restored is None)
        if restored is not None:
            jax.tree.map(np.testing.assert_array_equal, raw(restored.state), expected)
    assert any(outcomes)


def test_a_fallback_resumes_to_the_same_end(tmp_path):
    settings = DriveSettings(checkpoint_every=10)
    arguments = {"observer": Silent(), "folder": epath.Path(tmp_path)}
    whole = drive(toy_program(), [100, 101], settings, **arguments)
    truncate(tmp_path / "toy" / "replicates-00000-00002" / "30")
    with pytest.warns(UserWarning, match="checkpoint 30 .* is damaged"):
        again = drive(toy_program(), [100, 101], settings, **arguments)
    for name, value in whole.arrays.items():
        np.testing.assert_array_equal(value, again.arrays[name], err_msg=name)


def test_what_is_damaged_is_kept_aside(folder, tmp_path):
    fill(folder)
    truncate(tmp_path / "store" / "3")
    store = CheckpointStore(folder)
    with pytest.warns(UserWarning, match=r"is kept in .*/damaged, going back"):
        store.restore_newest(ABSTRACT)
    store.close()
    (kept,) = (tmp_path / "damaged").iterdir()
    assert kept.name.startswith("store-3-")
    assert (kept / "meta").is_dir()


def test_damage_everywhere_is_no_silent_start_from_scratch(folder, tmp_path):
    fill(folder)
    for step in ("2", "3"):
        empty(tmp_path / "store" / step)
    store = CheckpointStore(folder)
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(StorageError, match="all checkpoints are damaged and were moved"),
    ):
        store.restore_newest(ABSTRACT)
    assert store.restore_newest(ABSTRACT) is None  # asked again, it starts from scratch
    store.close()
    assert len(list((tmp_path / "damaged").iterdir())) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "new": jnp.zeros(3)},
        lambda state: {key: value for key, value in state.items() if key != "half"},
        lambda state: {**state, "w": jnp.zeros((64, 32))},
        lambda state: {**state, "w": jnp.zeros((64, 64), jnp.bfloat16)},
    ],
)
def test_other_code_is_no_damage(folder, change):
    fill(folder)
    store = CheckpointStore(folder)
    with pytest.raises(UserError, match=r"run_dir=.*checkpoint 3 was written by other code") as e:
        store.restore_newest(jax.eval_shape(lambda: change(state_of(0))))
    assert "\n" not in str(e.value)
    assert store.steps() == [2, 3]
    store.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (OSError(errno.EACCES, "Permission denied"), StorageError),
        (MemoryError(), MemoryError),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), StorageError),
    ],
)
def test_a_failing_machine_is_no_damage(folder, monkeypatch, error, expected):
    fill(folder)
    store = CheckpointStore(folder)

    def fail(*_):
        raise error

    monkeypatch.setattr(store, "_restore", fail)
    with pytest.raises(expected):
        store.restore_newest(ABSTRACT)
    monkeypatch.undo()
    assert store.steps() == [2, 3]
    store.close()


def test_the_log_level_is_given_back(tmp_path):
    logger = logging.getLogger("absl")
    before = logger.level
    stores = [CheckpointStore(epath.Path(tmp_path) / name) for name in "ab"]
    assert logger.level == logging.CRITICAL
    for store in stores:
        store.close()
    assert logger.level == before


def test_an_older_step_is_not_dropped_silently(folder):
    fill(folder)
    store = CheckpointStore(folder)
    with pytest.raises(StorageError, match="checkpoint 2 was not written, 3 is there already"):
        store.save(2, state_of(2), HISTORY, {})
    store.close()


def test_too_little_space_is_said_before_writing(folder, monkeypatch):
    fill(folder)
    store = CheckpointStore(folder)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"no space left .*1,000 bytes free.*step 3 is intact"):
        store.save(4, state_of(4), HISTORY, {})
    monkeypatch.undo()
    assert store.steps() == [2, 3]
    store.close()


def test_a_write_that_fails_is_one_clear_error(folder, monkeypatch):
    store = CheckpointStore(folder)

    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store._manager, "save", refuse)
    with pytest.raises(StorageError, match="no space left on the device"):
        store.save(1, state_of(1), HISTORY, {})
    monkeypatch.undo()
    store.close()
