"""How a run or a sweep ends: its exit code, and the width of what it prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from jaxlab.experiments.base import RunConfig

__all__ = ["CLAIMS_FAILED", "TABLE_WIDTH", "Judged", "claims_code"]

CLAIMS_FAILED = 4
TABLE_WIDTH = 100


class Judged(Protocol):
    """What is asked of a `jaxlab.reporting.claims.Claim`."""

    @property
    def kind(self) -> str: ...

    @property
    def verdict(self) -> str: ...


def claims_code(claims: Iterable[Judged], config: RunConfig) -> int:
    """The exit code of a finished run.

    Args:
      claims: of the run, or of all trials of a sweep; findings do not count.
      config: `fail_on_claims` asks for the code.

    Returns:
      4 if a claim's verdict is not `holds` and `fail_on_claims` is set, else 0.
    """
    failed = any(claim.kind == "claim" and claim.verdict != "holds" for claim in claims)
    return CLAIMS_FAILED if failed and config.fail_on_claims else 0
