"""One mesh with three axes for every machine.

* `data`: examples; parameters are whole on each of its devices.
* `fsdp`: examples as well, while parameters and optimiser state are split.
* `model`: the wide dimensions of the network (tensor parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlab.errors import UserError

__all__ = [
    "BATCH_AXES",
    "MESH_AXES",
    "batch_sharding",
    "check_batch",
    "make_mesh",
    "replicated",
    "split_examples",
]

MESH_AXES = ("data", "fsdp", "model")
BATCH_AXES = ("data", "fsdp")


def make_mesh(
    data: int = 1, fsdp: int = 1, model: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over all devices of all processes.

    Args:
      data: devices along `data`; -1 takes all that the others leave.
      fsdp: devices along `fsdp`; -1 likewise.
      model: devices along `model`; -1 likewise.
      devices: what to use; by default all of `jax.devices()`.

    Returns:
      A mesh with the axes `data`, `fsdp` and `model`, in the mode in which the compiler places
      intermediate values (Auto).

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "model": model}
    open_axes = [name for name, size in sizes.items() if size == -1]
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise UserError(f"mesh.{name}", size, "allowed: at least 1, or -1 for all that is left")
    if len(open_axes) > 1:
        raise UserError(f"mesh.{open_axes[1]}", -1, f"mesh.{open_axes[0]} is -1 already")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    text = " * ".join(str(size) for size in sizes.values() if size != -1)
    if open_axes:
        if len(devices) % fixed:
            problem = f"{len(devices)} devices cannot be divided by the other axes ({text})"
            raise UserError(f"mesh.{open_axes[0]}", -1, problem)
        sizes[open_axes[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise UserError(
            "mesh",
            text,
            f"{fixed} devices in the mesh, {len(devices)} in the machine; "
            "set one axis to -1 to take them all",
        )
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Whether a batch can be split over the mesh.

    Args:
      batch_size: examples in a batch.
      mesh: from `make_mesh`.

    Raises:
      UserError: naming the numbers.
    """
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if batch_size % parts:
        problem = f"must be a multiple of mesh.data * mesh.fsdp = {parts}"
        raise UserError("batch_size", batch_size, problem)


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Examples split over `data` and `fsdp`.

    Args:
      mesh: from `make_mesh`.
      leading: axes before that of the examples, e.g. 1 for several steps' batches.
    """
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, BATCH_AXES))


def split_examples(x: jax.Array) -> jax.Array:
    """Says that the first axis of an intermediate value holds examples, where a mesh is in use.

    Without it the compiler may spread a network's activations by the place of its parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(BATCH_AXES) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
