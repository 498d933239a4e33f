"""Roles of fields: what names a run, what may change."""

import dataclasses
from typing import Annotated

import pydantic
import pytest

from jaxlab.experiments.base import (
    RunConfig,
    config_fields,
    configuration,
    identity,
    identity_digest,
    option,
    static_identity,
    to_dict,
)


@configuration
class Inner:
    """Nested settings."""

    rate: Annotated[float, option("A rate.", traced=True, gt=0)] = 0.1


@configuration
class Outer(RunConfig):
    """Settings of a method that does not exist."""

    method: Annotated[str, option("Its name.")] = "outer"
    variant: Annotated[str, option("Its study.")] = "only"
    width: Annotated[int, option("A width.", ge=1)] = 4
    inner: Annotated[Inner, pydantic.Field()] = Inner()


def test_fields_are_found_in_nested_groups():
    fields = config_fields(Outer)
    assert fields["inner.rate"].traced
    assert not fields["width"].traced
    assert fields["quiet"].role == "execution"
    assert fields["replicates"].role == "extent"


def test_execution_and_extent_do_not_name_a_run():
    plain = Outer()
    same = Outer(quiet=True, run_dir="x", replicates=9, checkpoint_every=7)
    other = Outer(inner=Inner(rate=0.2))
    assert identity_digest(plain) == identity_digest(same)
    assert identity_digest(plain) != identity_digest(other)
    assert "inner.rate" in identity(plain)
    assert "inner.rate" not in static_identity(plain)
    assert static_identity(plain) == static_identity(other)
    assert static_identity(plain) != static_identity(Outer(replicates=9))


def test_configurations_are_frozen_and_closed():
    with pytest.raises(pydantic.ValidationError):
        Outer(wdith=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Outer().width = 5  # pyright: ignore[reportAttributeAccessIssue]
    assert to_dict(Outer())["inner"] == {"rate": 0.1}


def test_a_field_says_what_it_takes():
    fields = config_fields(Outer)
    assert fields["inner.rate"].allowed == "number > 0"
    assert fields["replicates"].allowed == "whole number >= 1, <= 4096"
    assert fields["steps_per_dispatch"].allowed == "whole number >= 1, <= 1000000 or auto"
    assert fields["trial_axis"].allowed == "auto, loop, vmap"
    assert fields["run_dir"].allowed == "text or null"
    assert fields["quiet"].allowed == "true or false"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite_by_default(value):
    with pytest.raises(pydantic.ValidationError, match="finite number"):
        Inner(rate=value)


def test_a_field_without_description_is_refused():
    @configuration
    class Bare(RunConfig):
        method: Annotated[str, option("Its name.")] = "bare"
        variant: Annotated[str, option("Its study.")] = "only"
        naked: int = 3

    with pytest.raises(TypeError, match="naked has no description"):
        config_fields(Bare)
