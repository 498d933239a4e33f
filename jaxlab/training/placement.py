"""Where the arguments of a program's functions lie: on one device, by lane, or on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlab.parallel.mesh import batch_sharding, replicated
from jaxlab.training.program import Program

__all__ = ["ByLane", "OnMesh", "OneDevice", "Placement", "Role"]

Role = Literal["trial", "state", "batch", "count", "result"]
"""What an argument is; `batch` holds several steps' batches, `result` comes back to the host."""


class _OneByOne:
    """A group is a single lane, without an axis of its own."""

    lanes_together = False

    def split(self, value: Any) -> list[Any]:
        """The inverse of `group`."""
        return [value]

    def over(self, function: Callable[..., Any], roles: Sequence[Role]) -> Callable[..., Any]:
        """`function` of one lane, over a group."""
        del roles
        return function


class OneDevice(_OneByOne):
    """One lane at a time on the default device."""

    def group(self, values: Sequence[Any], role: Role) -> Any:
        """A group's argument from its only lane's."""
        return values[0] if role == "batch" else jax.tree.map(jnp.asarray, values[0])

    def sharding(self, role: Role, size: int) -> Any:
        """None leaves it to JAX."""
        del role, size

    def stacked(self, state: Any) -> Any:
        """Shapes of all lanes' states in one pytree, with their shardings."""
        return state


class ByLane:
    """Groups of lanes with a leading axis, sharded over the devices."""

    lanes_together = True

    def group(self, values: Sequence[Any], role: Role) -> Any:
        """Lanes stacked and spread over the devices."""
        stack = np.stack if role == "batch" else jnp.stack
        stacked = jax.tree.map(lambda *leaves: stack(leaves), *values)
        return jax.device_put(stacked, self.sharding(role, len(values)))

    def split(self, value: Any) -> list[Any]:
        """The inverse of `group`; on one device, since groups may lie on different ones."""
        size = len(jax.tree.leaves(value)[0])
        first = jax.devices()[0]
        whole = jax.tree.map(
            lambda leaf: jax.device_put(leaf, first) if isinstance(leaf, jax.Array) else leaf, value
        )
        return [jax.tree.map(lambda leaf, i=i: leaf[i], whole) for i in range(size)]

    def over(self, function: Callable[..., Any], roles: Sequence[Role]) -> Callable[..., Any]:
        """`function` of one lane, over a group; a count is shared by its lanes."""
        return jax.vmap(function, in_axes=tuple(None if r == "count" else 0 for r in roles))

    def sharding(self, role: Role, size: int) -> NamedSharding:
        """The lane axis over the largest number of devices that divides it."""
        devices = jax.devices()
        count = max(n for n in range(1, len(devices) + 1) if size % n == 0)
        mesh = jax.make_mesh(
            (count,), ("lane",), axis_types=(AxisType.Auto,), devices=devices[:count]
        )
        return NamedSharding(mesh, PartitionSpec() if role == "count" else PartitionSpec("lane"))

    def stacked(self, state: Any) -> Any:
        """Shapes of all lanes' states in one pytree."""
        return state


class OnMesh(_OneByOne):
    """One lane at a time on all devices of a mesh, also of several processes.

    Args:
      mesh: from `parallel.make_mesh`.
      program: whose `shardings` place the state.
    """

    def __init__(self, mesh: Mesh, program: Program) -> None:
        self.mesh = mesh
        whole = replicated(mesh)
        state: Any = whole
        if program.shardings is not None:
            state = program.shardings(mesh)
        self._shardings: dict[Role, Any] = {
            "trial": whole,
            "state": state,
            "batch": batch_sharding(mesh, leading=1),
            "count": whole,
            "result": whole,
        }

    def group(self, values: Sequence[Any], role: Role) -> Any:
        """Host arrays, the same in every process, to global ones; each device takes its part."""
        (value,) = values
        if role == "state":
            return value
        sharding = self._shardings[role]

        def place(leaf: Any) -> jax.Array:
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(place, value)

    def sharding(self, role: Role, size: int) -> Any:
        """A sharding, or for the state a pytree of them."""
        del size
        return self._shardings[role]

    def stacked(self, state: Any) -> Any:
        """Shapes of all lanes' states in one pytree, each lane sharded as the state is."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=_with_lanes(sharding)
            ),
            state,
            self._state_tree(state),
        )

    def _state_tree(self, state: Any) -> Any:
        own = self._shardings["state"]
        if isinstance(own, NamedSharding):
            return jax.tree.map(lambda _: own, state)
        return own

    def stack(self, lanes: Sequence[Any]) -> Any:
        """Lanes' states in one pytree, in place."""
        shardings = jax.tree.map(_with_lanes, self._state_tree(lanes[0]))
        stack = jax.jit(
            lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees),
            out_shardings=shardings,
        )
        return stack(*lanes)

    def take(self, stacked: Any, index: int) -> Any:
        """One lane of `stack`'s result."""
        take = jax.jit(
            lambda tree: jax.tree.map(lambda leaf: leaf[index], tree),
            out_shardings=self._shardings["state"],
        )
        return take(stacked)


Placement = OneDevice | ByLane | OnMesh


def _with_lanes(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
