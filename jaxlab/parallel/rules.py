"""From the names that networks give to their axes to places on the mesh, strictly.

An axis without a rule, two axes of one array on the same mesh axis, and a size that does not
divide are errors that name the parameter. Nothing is replicated by accident.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlab.errors import UserError

__all__ = ["LOGICAL_RULES", "logical_sharding", "shardings_for"]

LOGICAL_RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "embed": "fsdp",
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "mlp": "model",
    "layers": None,
}
"""Logical axis to mesh axis; None keeps it whole on purpose."""


def logical_sharding(
    name: str,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: Mesh,
    rules: Mapping[str, str | None] = LOGICAL_RULES,
) -> NamedSharding:
    """The sharding of one array.

    Args:
      name: of the parameter, for errors.
      axes: logical name of each axis; None keeps it whole.
      shape: of the array.
      mesh: with the axes that the rules name.
      rules: logical axis to mesh axis.

    Returns:
      The sharding; axes of size 1 in the mesh are left out of it.

    Raises:
      ValueError: there is no rule for an axis, or two axes share a mesh axis.
      UserError: a size does not divide by the mesh's.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name}: {len(axes)} axis names {axes} for shape {shape}")
    places: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            close = difflib.get_close_matches(axis, rules, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name}: no rule for axis {axis!r}{hint} Rules: {', '.join(rules)}")
        place = rules[axis] if axis is not None else None
        if place is not None and place in places:
            raise ValueError(f"{name}: two axes of {axes} lie on mesh axis {place!r}")
        if place is not None and size % mesh.shape[place]:
            raise UserError(
                f"mesh.{place}",
                mesh.shape[place],
                f"must divide the {size} of axis {axis} of {name}",
            )
        places.append(place)
    used = [place if place is not None and mesh.shape[place] > 1 else None for place in places]
    return NamedSharding(mesh, PartitionSpec(*used))


def shardings_for(
    shapes: Any,
    axes: Any,
    mesh: Mesh,
    rules: Mapping[str, str | None] = LOGICAL_RULES,
) -> Any:
    """Shardings of a tree of arrays.

    Args:
      shapes: pytree of arrays or `ShapeDtypeStruct`s.
      axes: pytree of the same structure with a tuple of logical names at every leaf; None at a
        leaf keeps it whole everywhere.
      mesh: with the axes that the rules name.
      rules: logical axis to mesh axis.

    Returns:
      Pytree of `NamedSharding`s.

    Raises:
      ValueError, UserError: as `logical_sharding`.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(shapes)
    names = structure.flatten_up_to(axes)
    found = []
    for (path, leaf), own in zip(flat, names, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        own = (None,) * len(leaf.shape) if own is None else tuple(own)
        found.append(logical_sharding(name, own, tuple(leaf.shape), mesh, rules))
    return jax.tree_util.tree_unflatten(structure, found)
