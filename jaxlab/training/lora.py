"""Low-rank adapters as a pytree of their own, beside frozen parameters.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1: a weight W
becomes W + (alpha / rank) A B, where only A and B are trained and B starts at zero.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxlab.errors import StorageError, UserError

__all__ = [
    "INPUT_AXES",
    "init_lora",
    "load_lora",
    "lora_axes",
    "lora_parameter_count",
    "merge_lora",
    "save_lora",
    "save_params",
]

INPUT_AXES: Mapping[str, int] = {"attention_output": 2}
"""How many leading axes of a projection are inputs, by the last part of its name; 1 elsewhere."""


def _named(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _num_inputs(name: str) -> int:
    return INPUT_AXES.get(name.rsplit(".", 1)[-1], 1)


def init_lora(
    key: jax.Array,
    params: Any,
    *,
    rank: int,
    targets: Sequence[str] = (r"\.query$", r"\.value$"),
) -> dict[str, dict[str, jax.Array]]:
    """Fresh adapters: merged into the parameters they change nothing.

    Args:
      key: PRNG key.
      params: the frozen parameters.
      rank: columns of A and rows of B, at least 1.
      targets: regular expressions, searched in the dotted names of the parameters.

    Returns:
      Dotted name to `{"a": [*inputs, rank], "b": [rank, *outputs]}`, in the parameter's type;
      A is normal with variance 1 / inputs, B is zero.

    Raises:
      ValueError: the rank is below 1 or above a projection's smaller side, a pattern matches
        nothing, or it matches a vector.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}: must be at least 1")
    named = _named(params)
    chosen: dict[str, Any] = {}
    for pattern in targets:
        found = {name: leaf for name, leaf in named.items() if re.search(pattern, name)}
        if not found:
            raise ValueError(f"targets={pattern!r} matches none of {', '.join(sorted(named))}")
        chosen |= found
    adapters = {}
    for name, own_key in zip(sorted(chosen), jax.random.split(key, len(chosen)), strict=True):
        leaf, split = chosen[name], _num_inputs(name)
        inputs, outputs = leaf.shape[:split], leaf.shape[split:]
        if not outputs:
            raise ValueError(f"targets: {name} of shape {leaf.shape} is no projection")
        if rank > min(math.prod(inputs), math.prod(outputs)):
            raise ValueError(f"rank={rank}: exceeds the smaller side of {name} {leaf.shape}")
        scale = 1 / math.sqrt(math.prod(inputs))
        a = scale * jax.random.normal(own_key, (*inputs, rank), jnp.float32)
        adapters[name] = {
            "a": a.astype(leaf.dtype),
            "b": jnp.zeros((rank, *outputs), leaf.dtype),
        }
    return adapters


def merge_lora(
    params: Any, adapters: Mapping[str, Mapping[str, jax.Array]], *, alpha: float
) -> Any:
    """The parameters with the adapters added; pure, so a loss may differentiate through it.

    Args:
      params: the frozen parameters.
      adapters: from `init_lora`.
      alpha: the product of A and B is scaled by `alpha / rank`.

    Returns:
      Parameters of the same structure and types; the product is summed in float32 or wider.

    Raises:
      ValueError: an adapter's parameter does not exist.
    """
    unknown = [name for name in adapters if name not in _named(params)]
    if unknown:
        raise ValueError(f"adapters of parameters that do not exist: {', '.join(unknown)}")

    def change(path: Any, leaf: jax.Array) -> jax.Array:
        adapter = adapters.get(jax.tree_util.keystr(path, simple=True, separator="."))
        if adapter is None:
            return leaf
        wide = np.promote_types(leaf.dtype, np.float32)
        product = jnp.tensordot(
            adapter["a"], adapter["b"], axes=1, preferred_element_type=jnp.dtype(wide)
        )
        scale = alpha / adapter["b"].shape[0]
        return (leaf.astype(wide) + scale * product).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(change, params)


def lora_axes(
    axes: Any, adapters: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, tuple[str | None, ...]]]:
    """Logical axis names of adapters, from those of the parameters; the rank is kept whole.

    Args:
      axes: pytree of the parameters' structure with a tuple of names at each leaf.
      adapters: from `init_lora`, or their abstract shapes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {
        name: {
            "a": (*named[name][: _num_inputs(name)], None),
            "b": (None, *named[name][_num_inputs(name) :]),
        }
        for name in adapters
    }


def lora_parameter_count(adapters: Any) -> int:
    """Number of trained scalars."""
    return sum(leaf.size for leaf in jax.tree.leaves(adapters))


def save_lora(
    path: os.PathLike[str] | str, adapters: Mapping[str, Mapping[str, jax.Array]], *, alpha: float
) -> None:
    """Writes adapters as safetensors: `<name>.lora_a`, `<name>.lora_b` and alpha as metadata.

    Raises:
      jaxlab.errors.StorageError: the file could not be written; an older one stays.
    """
    tensors = {
        f"{name}.lora_{part}": np.asarray(value)
        for name, adapter in adapters.items()
        for part, value in adapter.items()
    }
    _write(path, tensors, {"format": "jaxlab lora", "alpha": json.dumps(alpha)})


def save_params(path: os.PathLike[str] | str, params: Any) -> None:
    """Writes parameters, e.g. merged ones, as safetensors under their dotted names.

    Raises:
      jaxlab.errors.StorageError: the file could not be written; an older one stays.
    """
    _write(path, {name: np.asarray(leaf) for name, leaf in _named(params).items()}, None)


def _write(
    path: os.PathLike[str] | str, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None
) -> None:
    target = os.fspath(path)
    temporary = f"{target}.{secrets.token_hex(4)}.tmp"
    try:
        contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        save_file(contiguous, temporary, metadata)
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise StorageError(f"cannot write {target}: {error}") from error


def load_lora(path: os.PathLike[str] | str) -> tuple[dict[str, dict[str, jax.Array]], float]:
    """Adapters and alpha from `save_lora`'s file.

    Raises:
      jaxlab.errors.UserError: the file does not exist, is damaged, or holds no adapters.
    """
    adapters: dict[str, dict[str, jax.Array]] = {}
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - the object is no mapping
                base, _, part = name.rpartition(".lora_")
                if not base or part not in ("a", "b"):
                    raise UserError("lora", path, f"holds {name}, which is no adapter")
                adapters.setdefault(base, {})[part] = jnp.asarray(file.get_tensor(name))
        alpha = float(json.loads(metadata["alpha"]))
    except (OSError, SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError("lora", path, f"cannot be read: {reason}") from None
    except (KeyError, ValueError, TypeError):
        raise UserError("lora", path, "its metadata name no alpha") from None
    incomplete = [name for name, adapter in adapters.items() if set(adapter) != {"a", "b"}]
    if incomplete or not adapters:
        raise UserError("lora", path, f"adapters without a or b: {', '.join(incomplete) or 'all'}")
    return adapters, alpha
