"""Checkpoints: the only module that knows Orbax.

A checkpoint is one atomic unit of three items: the state, the history of metrics so far, and a
JSON record with the step and a checksum of every array, since Orbax returns a flipped byte
without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from jaxlab.errors import StorageError, UserError
from jaxlab.ops.checksum import tree_checksums
from jaxlab.parallel.processes import agree, is_main

__all__ = ["CheckpointStore", "Restored"]

_NUM_NEWEST = 2
_SPACE_SLACK = 2**18  # bytes for metadata and what other writers add meanwhile
_DAMAGED = "damaged"
_MACHINE_ERRORS = {
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
}
_num_open = 0
_level_before = logging.NOTSET


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds.

    Attributes:
      step: training steps done.
      state: the saved pytree.
      history: metric name to array.
      meta: the JSON record that was given to `save`.
    """

    step: int
    state: Any
    history: dict[str, np.ndarray]
    meta: dict[str, Any]


class CheckpointStore:
    """Saves in the background and restores the newest intact checkpoint of one folder.

    Keeps the two newest checkpoints and the one with the smallest `best` value.

    Args:
      folder: absolute path, local or remote; made if needed.
    """

    def __init__(self, folder: epath.PathLike) -> None:
        self._folder = epath.Path(folder)
        _silence_absl(+1)
        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            best_fn=_best_value,
            best_mode="min",
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(_NUM_NEWEST),
                    policies.BestN(
                        get_metric_fn=_best_value,
                        reverse=True,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
        )
        with _storage_errors(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: Any,
        history: Mapping[str, np.ndarray],
        meta: Mapping[str, Any],
        best: float | None = None,
    ) -> None:
        """Starts writing a checkpoint; training may go on, and donate `state`'s buffers.

        Args:
          step: training steps done; must exceed the newest checkpoint's.
          state: pytree of arrays.
          history: metric name to array.
          meta: what a resume must know; JSON.
          best: the value that marks the best checkpoint when it is the smallest.

        Raises:
          StorageError: this save or an earlier one could not be written.
        """
        arrays = dict(history)
        record = {
            "step": step,
            "state_checksums": _checksums(state),
            "state_layout": _layout(state),
            "history_checksums": _checksums(arrays),
            "history_shapes": {name: list(value.shape) for name, value in arrays.items()},
            "history_dtypes": {name: str(value.dtype) for name, value in arrays.items()},
            "meta": dict(meta),
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            history=ocp.args.PyTreeSave({"arrays": arrays}),
            meta=ocp.args.JsonSave(record),
        )
        metrics = None if best is None else {"best": float(best)}
        self._check_space([state, arrays])
        with _storage_errors(self._folder):
            if not self._manager.save(step, args=items, metrics=metrics):
                raise StorageError(
                    f"{self._folder}: checkpoint {step} was not written, "
                    f"{self._manager.latest_step()} is there already"
                )

    def _check_space(self, trees: Any) -> None:
        """Asks first: a disk that fills up during a write makes Orbax's threads print a lot."""
        self.wait()
        if "://" in str(self._folder):
            return
        needed = _SPACE_SLACK + sum(int(leaf.nbytes) for leaf in jax.tree.leaves(trees))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise StorageError(
                f"{self._folder}: checkpoint not written: no space left on the device ({free:,} "
                f"bytes free, {needed:,} needed); {self._kept()}"
            )

    def _kept(self) -> str:
        steps = self.steps()
        return f"the checkpoint of step {steps[-1]} is intact" if steps else "none was saved before"

    def restore_newest(self, abstract_state: Any) -> Restored | None:
        """The newest intact checkpoint, or None if there has never been one.

        A checkpoint that cannot be read, or whose checksums differ, is reported by one warning
        and moved to the folder `damaged` beside this one, so that later saves of its step work.
        Nothing is deleted, and a disk or a memory that fails is no damage.

        Args:
          abstract_state: shapes, dtypes and, where it matters, shardings of the state.

        Raises:
          UserError: the state has another structure than this program's: other code wrote it.
          StorageError: the disk refused to be read, or every checkpoint is damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._restore(step, abstract_state)
            except (UserError, MemoryError):
                raise
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                if _is_environment(error):
                    problem = f"{self._folder}: checkpoint {step} cannot be read now: {reason}"
                    raise StorageError(problem) from error
                self._put_aside(step, reason)
        if steps:
            raise StorageError(
                f"{self._folder}: all checkpoints are damaged and were moved to "
                f"{self._folder.parent / _DAMAGED}; the same command now starts from scratch"
            )
        return None

    def _put_aside(self, step: int, reason: str) -> None:
        place = self._folder.parent / _DAMAGED
        if is_main():
            warnings.warn(
                f"checkpoint {step} in {self._folder} is damaged ({reason}); it is kept in "
                f"{place}, going back to the one before",
                stacklevel=3,
            )
            place.mkdir(parents=True, exist_ok=True)
            target = place / f"{self._folder.name}-{step}-{secrets.token_hex(4)}"
            (self._folder / str(step)).rename(target)
        agree(0)  # the other processes read the folder only after it has changed
        self._manager.reload()

    def _restore(self, step: int, abstract_state: Any) -> Restored:
        abstract_state = jax.tree.map(_with_sharding, abstract_state)
        items = ocp.args.Composite(meta=ocp.args.JsonRestore())
        record = self._manager.restore(step, args=items)["meta"]
        self._check_layout(step, record["state_layout"], _layout(abstract_state))
        dtypes = record["history_dtypes"]
        abstract_history = {
            "arrays": {
                name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtypes[name]))
                for name, shape in record["history_shapes"].items()
            }
        }
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=_restore_args(abstract_state),
                history=ocp.args.PyTreeRestore(
                    abstract_history,
                    restore_args=jax.tree.map(
                        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract_history
                    ),
                ),
            ),
        )
        history = items["history"]["arrays"]
        for kind, tree in (("state", items["state"]), ("history", history)):
            found, saved = _checksums(tree), record[f"{kind}_checksums"]
            wrong = [name for name in saved if found.get(name) != saved[name]]
            if wrong or found.keys() != saved.keys():
                raise ValueError(f"checksum of {kind} {', '.join(wrong[:3]) or 'names'} differs")
        return Restored(
            record["step"],
            items["state"],
            {name: np.array(value) for name, value in history.items()},
            record["meta"],
        )

    def _check_layout(self, step: int, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
        """Refuses a state of another structure, naming the first part that differs."""
        for name in {**saved, **wanted}:
            if saved.get(name) != wanted.get(name):
                raise UserError(
                    "run_dir",
                    self._folder,
                    f"its checkpoint {step} was written by other code or settings: {name} is "
                    f"{saved.get(name, 'not in it')}, this program has "
                    f"{wanted.get(name, 'none')}; choose another run_dir",
                )

    def wait(self) -> None:
        """Returns once all saves are on disk.

        Raises:
          StorageError: one of them could not be written.
        """
        with _storage_errors(self._folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the manager's threads.

        Raises:
          StorageError: a save could not be written.
        """
        try:
            with _storage_errors(self._folder):
                self._manager.close()
        finally:
            _silence_absl(-1)


def _layout(tree: Any) -> dict[str, str]:
    """Name, type and shape of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _is_environment(error: Exception) -> bool:
    """Whether the machine failed rather than the checkpoint."""
    if isinstance(error, OSError):
        return error.errno in _MACHINE_ERRORS
    text = str(error)
    return any(word in text for word in ("out of memory", "OUT_OF_MEMORY", "RESOURCE_EXHAUSTED"))


def _best_value(metrics: Mapping[str, float]) -> float:
    return metrics["best"]


def _with_sharding(leaf: Any) -> Any:
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(jax.local_devices()[0])
    )


def _restore_args(abstract: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
    )


def _checksums(tree: Any) -> dict[str, int]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {jax.tree_util.keystr(path): jnp.asarray(leaf) for path, leaf in leaves}
    return {name: int(value) for name, value in jax.device_get(tree_checksums(arrays)).items()}


@contextlib.contextmanager
def _storage_errors(folder: epath.Path) -> Iterator[None]:
    """Turns a full disk or a refused write, however Orbax words it, into one clear error."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        text = str(error) or type(error).__name__
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
        refused = "Permission denied" in text or "PERMISSION_DENIED" in text
        if not (full or refused or isinstance(error, OSError)):
            raise
        cause = "no space left on the device" if full else text.splitlines()[0][:200]
        raise StorageError(f"{folder}: checkpoint not written: {cause}") from error


def _silence_absl(change: int) -> None:
    """While a store is open, Orbax's threads do not log errors that are raised here anyway."""
    global _num_open, _level_before
    logger = logging.getLogger("absl")
    if _num_open == 0:
        _level_before = logger.level
    _num_open += change
    logger.setLevel(logging.CRITICAL if _num_open else _level_before)
