"""Start-up of many processes, and what they agree on."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlab.errors import UserError

__all__ = ["Agreement", "ProcessSettings", "agree", "is_main", "start_processes"]


@dataclasses.dataclass(frozen=True)
class ProcessSettings:
    """How this process finds the others.

    Attributes:
      coordinator: `host:port` of process 0; None asks the cluster's scheduler.
      num_processes: how many there are; None asks the scheduler.
      process_id: which one this is; None asks the scheduler.
      start_seconds: how long to wait for all of them.
      heartbeat_seconds: after how long a silent process counts as dead; the others then end.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: int = 300
    heartbeat_seconds: int = 100


def start_processes(settings: ProcessSettings) -> None:
    """Joins the other processes, if there are any; does nothing for a process on its own.

    With `coordinator` the three fields say all. Without it, a Slurm step of several tasks, a
    Cloud TPU slice of several hosts (also under GKE and JobSet) and Open MPI are recognised by
    their environment. Must run before anything else asks JAX for its devices.

    Raises:
      UserError: the fields are incomplete or the others did not come.
    """
    explicit = (settings.coordinator, settings.num_processes, settings.process_id)
    if any(value is not None for value in explicit):
        _check(settings)
    elif not _in_cluster(os.environ):
        return
    if jax.distributed.is_initialized():
        return
    # JAX's own service takes SIGTERM away from Python; the driver's flag, agreed on at every
    # dispatch, works on one process and on many.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            settings.coordinator,
            settings.num_processes,
            settings.process_id,
            initialization_timeout=settings.start_seconds,
            heartbeat_timeout_seconds=settings.heartbeat_seconds,
        )
    except Exception as error:  # the runtime raises types of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        where = settings.coordinator or "the cluster's"
        raise UserError(
            "distributed.coordinator", where, f"could not be joined: {reason}"
        ) from error


def _check(settings: ProcessSettings) -> None:
    for name in ("coordinator", "num_processes", "process_id"):
        if getattr(settings, name) is None:
            raise UserError(
                f"distributed.{name}",
                None,
                "needed, since others of coordinator, num_processes and process_id are given",
            )
    assert settings.num_processes is not None
    assert settings.process_id is not None
    if not 0 <= settings.process_id < settings.num_processes:
        raise UserError(
            "distributed.process_id",
            settings.process_id,
            f"allowed: 0 to {settings.num_processes - 1}",
        )


def _in_cluster(environment: Any) -> bool:
    """Whether a scheduler has started several of these processes."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    hosts = environment.get("TPU_WORKER_HOSTNAMES") or environment.get("TPU_PROCESS_ADDRESSES")
    return (
        (tasks.isdigit() and int(tasks) > 1 and "SLURM_PROCID" in environment)
        or (hosts is not None and "," in hosts)
        or "MEGASCALE_COORDINATOR_ADDRESS" in environment
        or int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1
    )


def is_main() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest value that any process has; all get the same.

    Every process must call it at the same place.
    """
    if jax.process_count() == 1:
        return value
    return int(Agreement().send(value))


class Agreement:
    """A largest value over processes that is asked for now and read later.

    `send` starts the exchange and returns an array; reading it waits. A loop that reads the
    array of its last round never waits for the slowest process twice.
    """

    def __init__(self) -> None:
        devices = np.array(jax.devices())
        mesh = jax.make_mesh(
            (devices.size,), ("all",), axis_types=(AxisType.Auto,), devices=list(devices)
        )
        self._split = NamedSharding(mesh, PartitionSpec("all"))
        self._largest = jax.jit(
            lambda flags: flags.max(), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def send(self, value: int) -> jax.Array:
        """Starts an exchange; every process must take part.

        Returns:
          int32 scalar, the largest value, still being computed.
        """
        flags = jax.make_array_from_callback(
            (jax.device_count(),), self._split, lambda index: np.full(1, value, np.int32)
        )
        return self._largest(flags)
