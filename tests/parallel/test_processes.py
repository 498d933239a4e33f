"""Which surroundings mean many processes."""

import jax
import pytest

from jaxlab.errors import UserError
from jaxlab.parallel import processes
from jaxlab.parallel.processes import ProcessSettings, agree, is_main, start_processes

ALONE = [
    {},
    {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    {"SLURM_NTASKS": "4"},  # an allocation of four tasks, but this is no task of a step
    {"TPU_WORKER_HOSTNAMES": "localhost"},
    {"OMPI_COMM_WORLD_SIZE": "1"},
]
TOGETHER = [
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"},
    {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
    {"TPU_WORKER_HOSTNAMES": "a,b"},
    {"TPU_PROCESS_ADDRESSES": "a:1,b:1"},
    {"MEGASCALE_COORDINATOR_ADDRESS": "a"},
    {"OMPI_COMM_WORLD_SIZE": "2"},
]


@pytest.mark.parametrize("environment", ALONE)
def test_a_process_on_its_own(environment):
    assert not processes._in_cluster(environment)


@pytest.mark.parametrize("environment", TOGETHER)
def test_a_process_among_others(environment):
    assert processes._in_cluster(environment)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ProcessSettings(coordinator="a:1"), r"^distributed\.num_processes=None: needed"),
        (ProcessSettings("a:1", 2), r"^distributed\.process_id=None: needed"),
        (ProcessSettings(None, 2, 0), r"^distributed\.coordinator=None: needed"),
        (ProcessSettings("a:1", 2, 2), r"^distributed\.process_id=2: allowed: 0 to 1"),
    ],
)
def test_incomplete_fields_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        start_processes(settings)


def test_alone_nothing_is_started(monkeypatch):
    monkeypatch.setattr(processes.os, "environ", {})
    start_processes(ProcessSettings())
    assert not jax.distributed.is_initialized()
    assert is_main()
    assert agree(7) == 7
