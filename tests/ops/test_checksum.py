"""The checksum notices every single change and does not depend on layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.ops.checksum import checksum, tree_checksums


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "uint32"]
)
def test_every_flipped_bit_is_noticed(dtype):
    values = jnp.asarray(np.random.default_rng(0).integers(0, 2, 12), dtype)
    original = int(checksum(values))
    raw = np.array(values)
    bits = 1 if dtype == "bool" else 8 * raw.itemsize
    for place in range(raw.size):
        for bit in range(bits):
            changed = raw.copy()
            view = changed.view(np.uint8).reshape(raw.size, raw.itemsize)
            view[place, bit // 8] ^= 1 << (bit % 8)
            assert int(checksum(jnp.asarray(changed))) != original, (place, bit)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "complex64", "float8_e4m3fn"])
def test_unusual_types(dtype):
    values = jnp.asarray([0, 1, 1, 0, 1, 0, 0, 1], dtype)
    sums = {int(checksum(values))}
    for place in range(8):
        sums.add(int(checksum(values.at[place].set(jnp.asarray(2, dtype)))))
    assert len(sums) == 9


def test_order_matters():
    assert int(checksum(jnp.array([1.0, 2.0]))) != int(checksum(jnp.array([2.0, 1.0])))


def test_shape_does_not():
    values = jnp.arange(12.0)
    assert int(checksum(values)) == int(checksum(values.reshape(3, 4)))


def test_empty_arrays_and_keys():
    assert int(checksum(jnp.zeros((0,)))) == 0
    keys = jax.random.split(jax.random.key(0), 3)
    assert int(checksum(keys)) == int(checksum(jax.random.key_data(keys)))


def test_64_bit_words():
    with jax.enable_x64(True):
        values = jnp.arange(4.0, dtype=jnp.float64)
        raised = values.at[1].set(np.nextafter(1.0, 2.0))
        assert int(checksum(values)) != int(checksum(raised))


def test_tree():
    tree = {"a": jnp.ones(3), "b": jnp.zeros((2, 2), jnp.int32)}
    assert {k: int(v) for k, v in tree_checksums(tree).items()} == {
        k: int(checksum(v)) for k, v in tree.items()
    }
