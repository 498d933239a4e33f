import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxlab.data.windows import WindowBatches
from jaxlab.errors import UserError

TOKENS = np.arange(47, dtype=np.uint8)


def make(**changes):
    return WindowBatches(TOKENS, **{"batch_size": 3, "context": 3, "seed": 5, **changes})


def test_a_batch_holds_rows_of_neighbouring_tokens():
    batches = make()
    assert batches.steps_per_epoch == 3  # 11 windows of 4 tokens
    batch = batches[0]
    assert batch.dtype == np.int32
    assert batch.shape == (3, 4)
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(4))
    assert (batch[:, 0] % 4 == 0).all()


def test_an_epoch_visits_windows_once_and_the_next_in_another_order():
    batches = make(batch_size=11)
    epochs = [batches[epoch] for epoch in range(4)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(44))
    orders = {tuple(epoch[:, 0]) for epoch in epochs}
    assert len(orders) == 4


def test_an_epoch_of_several_steps_repeats_no_window():
    batches = make()
    for epoch in range(3):
        steps = range(epoch * 3, epoch * 3 + 3)
        starts = np.concatenate([batches[step][:, 0] for step in steps])
        assert len(set(starts.tolist())) == 9


def test_a_batch_depends_on_seed_and_step_alone():
    expected = [make()[step] for step in range(12)]
    batches = make()
    for step in (11, 0, 7, 7, 3, 10, 1, 4, 2, 9, 5, 8, 6):
        np.testing.assert_array_equal(batches[step], expected[step])
    other = make(seed=6)
    assert any((other[step] != expected[step]).any() for step in range(3))


def test_steps_have_no_end():
    batches = make()
    assert batches[10**12].shape == (3, 4)


def test_threads_read_what_one_thread_reads():
    steps = [int(step) for step in np.random.default_rng(0).integers(0, 60, size=400)]
    alone = make()
    shared = make()
    with ThreadPoolExecutor(8) as pool:
        for step, batch in zip(steps, pool.map(shared.__getitem__, steps), strict=True):
            np.testing.assert_array_equal(batch, alone[step])


def test_grain_reads_the_same_batches():
    batches = make()
    dataset = batches.dataset()
    for step in (0, 2, 3, 50):
        np.testing.assert_array_equal(dataset[step], batches[step])
    iterator = iter(dataset.to_iter_dataset())
    for step in range(5):
        np.testing.assert_array_equal(next(iterator), batches[step])
    iterator.set_state({"next_index": 40})
    np.testing.assert_array_equal(next(iterator), batches[40])


def test_it_can_be_sent_to_another_process():
    batches = make()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(batches))[4], batches[4])


def test_just_enough_tokens_make_one_batch():
    batches = WindowBatches(TOKENS[:12], batch_size=3, context=3, seed=0)
    assert batches.steps_per_epoch == 1
    with pytest.raises(UserError, match=r"data=11 tokens: too few .* need 12 tokens"):
        WindowBatches(TOKENS[:11], batch_size=3, context=3, seed=0)


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"context": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make(**changes)


def test_other_misuse_is_refused():
    with pytest.raises(TypeError, match="float64"):
        WindowBatches(np.ones(30), batch_size=1, context=3, seed=0)
    with pytest.raises(ValueError, match="one row"):
        WindowBatches(np.ones((5, 6), int), batch_size=1, context=3, seed=0)
    with pytest.raises(IndexError, match="step=-1"):
        make()[-1]
