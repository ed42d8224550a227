"""Whether a grammar compiles in time, found out in a process that can be ended.

No bound on the text of a schema bounds the time of its compilation: llguidance compares regular expressions with each
other, and native code cannot be interrupted. So each grammar is compiled in a helper process first. Past the deadline
that process is killed and the grammar refused. Compilation depends on nothing but the grammar and the vocabulary, so
in the engine's process a grammar that passed takes about as long as it did there.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import lru_cache
from threading import Lock, Timer
from typing import IO, Any, cast

from edgespec.engine.grammar_check_main import Spelling, main
from edgespec.errors import InvalidRequest

DEADLINE_S = 3.0
_MAX_REMEMBERED = 64  # grammars, with their verdicts


class GrammarCheck:
    """The helper process of one vocabulary. It starts with the first check, and again after a grammar that hung."""

    def __init__(self, spelling: Spelling, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s` is for each grammar, without the helper's start."""
        self._spelling = spelling
        self._deadline_s = deadline_s
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._judge = lru_cache(_MAX_REMEMBERED)(self._ask)

    def require(self, grammar: str) -> None:
        """Raises InvalidRequest for a grammar that does not compile, or not in time. Any thread; may wait."""
        with self._lock:
            fault = self._judge(grammar)
        if fault:
            raise InvalidRequest(f"the answer's structure cannot be followed: {fault}.", hint="Correct or simplify it.")

    def close(self) -> None:
        """End the helper, also while a grammar is being compiled in it."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ask(self, grammar: str) -> str:
        """What is wrong with `grammar`; "" where it is sound."""
        try:
            process = self._running()
        except (OSError, EOFError, pickle.PickleError):
            self._end()
            return "the process that compiles grammars cannot be started"
        timer = Timer(self._deadline_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            pickle.dump(grammar, _pipe(process.stdin))
            _pipe(process.stdin).flush()
            return str(pickle.load(_pipe(process.stdout)))
        except (OSError, EOFError, pickle.PickleError):  # killed, or dead for want of memory
            self._end()
            return f"it is too complex (its grammar needs more than {self._deadline_s:g} seconds or too much memory)"
        finally:
            timer.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        """The helper, ready for a grammar."""
        if self._process is not None and self._process.poll() is not None:  # it died while it had nothing to do
            self._end()
        if self._process is None:
            path = [each for each in sys.path if each]
            start = f"import sys; sys.path[:] = {path!r}; from {main.__module__} import main; main()"
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            pickle.dump((self._spelling, self._deadline_s), _pipe(process.stdin))
            _pipe(process.stdin).flush()
            pickle.load(_pipe(process.stdout))  # it has built its vocabulary
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()


def _pipe(stream: IO[bytes] | None) -> Any:
    return cast(IO[bytes], stream)
