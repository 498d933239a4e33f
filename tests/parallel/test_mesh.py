"""Shapes of meshes and what does not fit."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxlab.errors import UserError
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel.rules import LOGICAL_RULES, logical_sharding, shardings_for


@pytest.fixture
def eight(monkeypatch):
    """Eight devices as far as arithmetic goes."""
    monkeypatch.setattr(
        jax,
        "make_mesh",
        lambda shape, names, **_: SimpleNamespace(shape=dict(zip(names, shape, strict=True))),
    )
    return list(range(8))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((2, 2, 2), (2, 2, 2)),
        ((-1, 1, 1), (8, 1, 1)),
        ((1, -1, 2), (1, 4, 2)),
        ((8, 1, -1), (8, 1, 1)),
    ],
)
def test_one_axis_may_take_what_is_left(eight, sizes, shape):
    assert tuple(meshes.make_mesh(*sizes, devices=eight).shape.values()) == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (3, 1, 1),
            "mesh=3 * 1 * 1: 3 devices in the mesh, 8 in the machine; set one axis to -1 "
            "to take them all",
        ),
        ((-1, 3, 1), "mesh.data=-1: 8 devices cannot be divided by the other axes (3 * 1)"),
        ((-1, -1, 1), "mesh.fsdp=-1: mesh.data is -1 already"),
        ((0, 1, 1), "mesh.data=0: allowed: at least 1, or -1 for all that is left"),
        ((1, 1, -2), "mesh.model=-2: allowed: at least 1, or -1 for all that is left"),
    ],
)
def test_a_wrong_product_is_one_line_with_the_numbers(eight, sizes, message):
    with pytest.raises(UserError) as caught:
        meshes.make_mesh(*sizes, devices=eight)
    assert str(caught.value) == message


def test_a_batch_must_divide(eight):
    mesh = meshes.make_mesh(2, 2, 2, devices=eight)
    meshes.check_batch(16, mesh)
    with pytest.raises(UserError) as caught:
        meshes.check_batch(6, mesh)
    assert str(caught.value) == "batch_size=6: must be a multiple of mesh.data * mesh.fsdp = 4"


def one_device() -> Any:
    return meshes.make_mesh(devices=jax.devices()[:1])


def stand_in(**sizes) -> Any:
    return cast(Any, SimpleNamespace(shape={"data": 1, "fsdp": 1, "model": 1} | sizes))


def test_an_axis_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match=r"w: no rule for axis 'embd'; did you mean embed\?"):
        logical_sharding("w", ("embd",), (4,), one_device())


def test_two_axes_cannot_share_a_mesh_axis():
    with pytest.raises(ValueError, match=r"w: two axes of .* lie on mesh axis 'model'"):
        logical_sharding("w", ("heads", "mlp"), (4, 4), one_device())


def test_a_size_that_does_not_divide_names_the_parameter():
    expected = r"mesh\.model=4: must divide the 2 of axis kv_heads of layer_0\.key"
    with pytest.raises(UserError, match=expected):
        logical_sharding("layer_0.key", ("embed", "kv_heads"), (8, 2), stand_in(model=4))


def test_names_and_shape_must_match():
    with pytest.raises(ValueError, match="w: 1 axis names"):
        logical_sharding("w", ("embed",), (4, 4), one_device())


def test_a_tree_keeps_its_structure():
    shapes = {"a": jax.ShapeDtypeStruct((4, 8), "float32"), "b": jax.ShapeDtypeStruct((), "int32")}
    found = shardings_for(shapes, {"a": ("vocab", "embed"), "b": None}, one_device())
    assert found["a"].spec == PartitionSpec(None, None)  # axes of size 1 are left out
    assert found["b"].spec == PartitionSpec()


def test_every_rule_lies_on_the_mesh():
    assert set(LOGICAL_RULES.values()) <= {*meshes.MESH_AXES, None}
