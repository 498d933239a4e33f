"""The exceptions that jaxlab's own code raises for its users.

The command line turns each of them into one line and an exit code; a program that imports
jaxlab can catch them by type.
"""

from __future__ import annotations

__all__ = ["DivergedError", "InterruptedRun", "JaxlabError", "StorageError", "UserError"]


class JaxlabError(Exception):
    """Base of the errors below.

    Attributes:
      exit_code: what the command line exits with.
    """

    exit_code: int = 1


class UserError(JaxlabError):
    """A value that the user gave cannot be used.

    Attributes:
      field: dotted name of the field or argument, e.g. `optimizer.peak_lr`.
      value: what was given.
      allowed: what would have been accepted, in words.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}={value}: {allowed}")


class DivergedError(JaxlabError):
    """A monitored training metric became NaN or infinite."""

    exit_code = 3


class StorageError(JaxlabError):
    """The run directory could not be written: a full disk, lost permissions, a broken mount."""

    exit_code = 1


class InterruptedRun(JaxlabError):
    """A signal stopped the run after it had saved its state; the same command resumes it."""

    def __init__(self, signal_number: int, message: str) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)
