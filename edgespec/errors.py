"""Every error that a user can meet. `cli/main.py` maps them to text and exit codes.

EdgespecError             1  an expected failure, with the exit code of the command
  InvalidRequest          2  options, prompts, bodies
    ContextOverflow
      PromptTooLong
    NotReady
    Unsupported              a self-draft or head that a model cannot have (backends.attached_draft)
  RegistryError           3  models.toml
  UnknownModel            3
  HubError                4  the network and the hub
    HubUnreachable           (models.hub_errors)
  CacheError              4  folders and disks
  InvalidModelFile        5
  DraftRefused            5
  TemplateError           5
  DoesNotFit              6  memory
  BackendUnavailable      7  a runtime that is not installed
  BackendError            7  a failure inside a runtime
    RollbackError
    NonFiniteLogits          (core.truncate)
Cancelled                    no error: work that nobody wants any more
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


_MAX_LENGTH = 2000  # characters of a message
_END_LENGTH = 500
_DIRECTIONS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they turn text around


class EdgespecError(Exception):
    """An expected failure: `message` is one sentence; `hint` names the next action, if the message does not.

    `exit_code` is the exit code of the command line; 1 is a failure of the engine.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = make_harmless(message), make_harmless(hint)
        super().__init__(self.message)

    @property
    def text(self) -> str:
        """The message and the hint."""
        return f"{self.message} {self.hint}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the hint when the error is pickled."""
        return partial(type(self), hint=self.hint), (self.message,)


def find_near(name: str, known: Iterable[str]) -> str | None:
    """The known name of which `name` may be a misspelling; None if no one is near."""
    from difflib import get_close_matches  # `edgespec --help` needs it not

    return next(iter(get_close_matches(name, known, 1, cutoff=0.65)), None)


def make_harmless(text: str) -> str:
    """`text`, which may quote a file or a server, without what steers a terminal, and of a bounded length."""
    if len(text) > _MAX_LENGTH:
        text = f"{text[: _MAX_LENGTH - _END_LENGTH]} […] {text[-_END_LENGTH:]}"
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if c in _DIRECTIONS or (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t")
        else c
        for c in text
    )


def reason_of(error: BaseException) -> str:
    """The text of another library's error, on one line, without its full stop and the number of a system error."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _ERRNO.sub("", " ".join(text.split()) or type(error).__name__).rstrip(".")


def names_memory(text: str) -> bool:
    """Tells whether a runtime's words mean that there was not enough memory."""
    return re.search("(?<!pre-)allocat|bad_alloc|out of memory|outofdevicememory", text.lower()) is not None


class InvalidRequest(EdgespecError):
    """A value, prompt or combination of options that is not possible."""

    exit_code = 2


class ContextOverflow(InvalidRequest):
    """The prompt leaves no space for an answer in the context window."""


class PromptTooLong(ContextOverflow):
    """A prompt of `n_prompt` tokens, or of so many at least, for a context of `n_context`."""

    def __init__(self, message: str, *, hint: str = "", n_prompt: int, n_context: int) -> None:
        super().__init__(message, hint=hint)
        self.n_prompt = n_prompt
        self.n_context = n_context

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the numbers when the error is pickled."""
        return partial(type(self), hint=self.hint, n_prompt=self.n_prompt, n_context=self.n_context), (self.message,)


class NotReady(InvalidRequest):
    """Work for an engine that is busy, or has no model open."""


class RegistryError(EdgespecError):
    """A models.toml that does not follow the schema."""

    exit_code = 3


class UnknownModel(EdgespecError):
    """A model reference that names no known model."""

    exit_code = 3


class HubError(EdgespecError):
    """A repository, file or network problem at the model hub."""

    exit_code = 4


class CacheError(EdgespecError):
    """A folder that cannot be read or written, or a disk that is full."""

    exit_code = 4


class InvalidModelFile(EdgespecError):
    """A file that is not a usable model: damaged, truncated, or of another format."""

    exit_code = 5


class DraftRefused(EdgespecError):
    """A drafter that cannot serve this target; the message gives the reason."""

    exit_code = 5


class DoesNotFit(EdgespecError):
    """Weights, KV cache and draft model need more memory than is available."""

    exit_code = 6


class BackendUnavailable(EdgespecError):
    """A runtime that is not installed or does not support this machine."""

    exit_code = 7


class BackendError(EdgespecError):
    """A failure inside a runtime."""

    exit_code = 7


class RollbackError(BackendError):
    """A session's cache could not return to an earlier position; the session is dropped."""


class TemplateError(EdgespecError):
    """A chat template that is malformed, or exceeds its limits of size and time."""

    exit_code = 5


class Cancelled(Exception):
    """Raised by a cancellation check; the loop and the engine turn it into `Finished("cancelled")`."""


STOPS = (Cancelled, KeyboardInterrupt, GeneratorExit)
"""What may end other people's code, such as a drafter of a package, without being its fault. All else that it raises is
its fault: SystemExit too, and panics of Rust, which are no Exceptions either.
"""


@contextmanager
def reading(path: Path, failure: str = "cannot be read", hint: str = "Check its permissions.") -> Iterator[None]:
    """Turn an OSError in the block, which reads `path`, into a CacheError.

    `failure` says what failed if the block does not read `path`.
    """
    try:
        yield
    except OSError as error:
        raise CacheError(f"{path} {failure}: {reason_of(error)}.", hint=hint) from error
