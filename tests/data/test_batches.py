import numpy as np
import pytest

from jaxlab.data.batches import EpochOrder


@pytest.mark.parametrize(
    ("num_rows", "width"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (200_000, 4)]
)
def test_an_order_is_numpys_permutation_in_the_smallest_type(num_rows, width):
    order = EpochOrder(num_rows, batch_size=num_rows, seed=7)
    for epoch in (0, 5):
        bits = np.random.PCG64(np.random.SeedSequence([7, epoch]))
        expected = np.random.Generator(bits).permutation(num_rows)
        rows = order.rows(epoch)
        assert rows.dtype.itemsize == width
        np.testing.assert_array_equal(rows, expected)


def test_steps_part_an_epoch():
    order = EpochOrder(11, batch_size=3, seed=0)
    assert order.steps_per_epoch == 3
    for epoch in range(5):
        rows = np.concatenate([order.rows(3 * epoch + step) for step in range(3)])
        assert len(set(rows.tolist()) & set(range(11))) == 9


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"seed": -1}, {"num_rows": 2}])
def test_numbers_out_of_range_are_refused(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be at least"):
        EpochOrder(**{"num_rows": 11, "batch_size": 3, "seed": 0, **changes})
