"""Nineteen ICLR 2026 papers as pure JAX functions, and one command that re-tests their claims.

The mathematics is in `jaxlab.methods` (`from jaxlab.methods import trec`); a whole study is
`jaxlab.run_experiment("trec", steps=200)`, or `python -m jaxlab.run method=trec` in a terminal.
Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlab.reporting.report import Result

__all__ = ["__version__", "run_experiment"]

__version__ = "0.1.0"


def run_experiment(
    method: str, *, variant: str | None = None, preset: str = "cpu", **overrides: Any
) -> Result:
    """Runs a method's study in this process and returns what it found.

    Writes no files unless `run_dir=` is among the overrides.

    Args:
      method: a registered method, e.g. `"trec"`.
      variant: one of its studies; by default the first.
      preset: `test`, `cpu` or `paper`.
      **overrides: fields of its configuration (`steps=200`, `optimizer={"peak_lr": 1e-3}`).

    Returns:
      Metrics, claims and figures; a notebook shows them as they are.

    Raises:
      jaxlab.errors.UserError: an unknown field or a value that is not allowed.
    """
    from jaxlab.experiments.composition import make_config
    from jaxlab.experiments.runner import run

    config = make_config(method, variant=variant, preset=preset, **overrides)
    return run(config, run_dir=None if config.run_dir is None else config.output_folder())
