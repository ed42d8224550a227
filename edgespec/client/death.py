"""Why an engine process has ended, from its exit code and its last words."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgespec.autopilot.store import calibration_folder
from edgespec.errors import BackendError, names_memory
from edgespec.files import write_atomically

_MAX_BYTES = 256 * 1024
_MAX_WORDS = 200
_FAULT = "Fatal Python error: "  # a dump of Python's stacks follows
_TOLD = re.compile(r"^error: (.+)\.\nhint: (.+)$", re.MULTILINE)  # of backends.llamacpp.rpc, before it ends the process
_CAUSE = re.compile(r"GGML_ASSERT|\berror\b|\bfailed\b|\w(Error|Exception)\b|what\(\):|out of memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of an engine process that nobody had closed.

    cause     for counters: a signal's name, 'exit', 'silence', 'message', 'stopped' or 'worker'
    reason    a clause for people, without a full stop
    is_asked  whether it was ended on request
    log       the file that keeps the output; None if there was none
    hint      what to do before the model is opened again, as a sentence; "" for nothing
    """

    cause: str
    reason: str
    is_asked: bool = False
    log: Path | None = None
    hint: str = ""


CLOSED = Death("closed", "the model has been closed", is_asked=True)


def explain(exit_code: int, output: IO[bytes]) -> Death:
    """Why an engine process has ended, with its last words. What it has written to `output` is kept in `last_log()`."""
    output.seek(max(0, os.fstat(output.fileno()).st_size - _MAX_BYTES))
    text, log = output.read().decode("utf-8", "replace"), None
    with suppress(OSError):
        if text.strip():
            last_log().parent.mkdir(parents=True, exist_ok=True)
            write_atomically(last_log(), text)
            log = last_log()
    if exit_code == BackendError.exit_code and (told := _TOLD.findall(text)):
        reason, hint = told[-1]
        return Death("worker", reason[0].lower() + reason[1:], log=log, hint=hint)
    name, words = "", find_last_words(text)
    with suppress(ValueError):  # a real-time signal has no name
        name = signal.Signals(-exit_code).name if exit_code < 0 else ""
    hint = "The system kills processes when memory runs out." if name == "SIGKILL" else ""
    if names_memory(words):
        hint = "Memory ran out: close other programs, or use a smaller --ctx or fewer --gpu-layers."
    end = f"{name or f'code {exit_code}'}{words and ': '}{words}"
    return Death(name or "exit", f"the engine's process ended with {end}", log=log, hint=hint)


def last_log() -> Path:
    """The file that keeps the output of the engine process that died last."""
    return calibration_folder().parent / "last-engine-death.log"


def find_last_words(text: str) -> str:
    """The line that tells why a process ended: the last one that names an error, else the last one; "" if none.

    Runtimes and Python write their stacks after that line.
    """
    lines = [line.strip() for line in text.partition(_FAULT)[0].split("\n") if line.strip()]
    causes = [line for line in lines if _CAUSE.search(line)]
    return (causes or lines or [""])[-1][:_MAX_WORDS].rstrip(".")
