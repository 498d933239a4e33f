"""An exact integer checksum of arrays, the same on every mesh and process count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

__all__ = ["checksum", "tree_checksums"]


def checksum(x: Array) -> UInt32[Array, ""]:
    """A sum of an array's words, hashed with their places, modulo 2**32.

    The hash is a bijection (MurmurHash3's finaliser), so a change of any single word changes the
    sum, and unrelated changes cancel with a probability of about 2**-32. Integer addition is
    associative: the value does not depend on how the array is sharded.

    Args:
      x: any shape; numbers, booleans or PRNG keys.

    Returns:
      The sum; 0 for an empty array.

    >>> import jax.numpy as jnp
    >>> a = jnp.arange(4.0)
    >>> int(checksum(a)) == int(checksum(a.at[2].set(2.0000002)))
    False
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    elif jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    elif jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
        x = x.astype(jnp.float32)
    narrow = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, narrow).astype(jnp.uint32).reshape(-1)
    place = jax.lax.iota(jnp.uint32, words.size)
    return jnp.sum(_mix(words ^ _mix(place + jnp.uint32(1))), dtype=jnp.uint32)


def _mix(x: UInt32[Array, "words"]) -> UInt32[Array, "words"]:
    """A bijection of 32-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


@jax.jit
def tree_checksums(tree: dict) -> dict:
    """`checksum` of every leaf of a pytree, in one compiled program."""
    return jax.tree.map(checksum, tree)
