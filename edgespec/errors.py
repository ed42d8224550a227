"""Every error a user can meet, with the next thing to do; mapped to text and exit code in one place, `cli/main.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class EdgespecError(Exception):
    """An expected failure: one clear sentence, and a `hint` that names the next thing to do.

    `exit_code` is what the command line returns for it; 1 is left to plain failures of the engine.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can cross from one process to another."""
        return partial(type(self), hint=self.hint), (self.message,)


def reason_of(error: BaseException) -> str:
    """What a foreign error says, on one line and without its full stop."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")


class InvalidRequest(EdgespecError):
    """A value, prompt or combination of options that cannot be served."""

    exit_code = 2


class ContextOverflow(InvalidRequest):
    """The prompt leaves no room for an answer in the context window."""


class RegistryError(EdgespecError):
    """A models.toml that does not follow the schema."""

    exit_code = 3


class UnknownModel(EdgespecError):
    """A model reference that names nothing known."""

    exit_code = 3


class HubError(EdgespecError):
    """A repository, file or network problem at the model hub."""

    exit_code = 4


class CacheError(EdgespecError):
    """A folder that cannot be read or written, or a disk that is full."""

    exit_code = 4


class InvalidModelFile(EdgespecError):
    """A file that is not a usable model: damaged, cut short, or another format."""

    exit_code = 5


class DraftRefused(EdgespecError):
    """A drafter that cannot serve this target; the message gives the reason."""

    exit_code = 5


class DoesNotFit(EdgespecError):
    """Weights, KV cache and draft need more memory than the machine has."""

    exit_code = 6


class BackendUnavailable(EdgespecError):
    """A runtime that is not installed or cannot serve this machine."""

    exit_code = 7


class BackendError(EdgespecError):
    """A runtime that failed while it worked."""

    exit_code = 7


class RollbackError(BackendError):
    """A session whose cache could not return to an earlier position; the session is dropped."""


class TemplateError(EdgespecError):
    """A chat template that is malformed, or exceeds its limits of size and time."""

    exit_code = 5


class Cancelled(Exception):
    """Raised by a cancellation check to unwind; the loop and engine turn it into `Finished("cancelled")`."""
