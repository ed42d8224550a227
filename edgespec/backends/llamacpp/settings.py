"""Measures the settings that llama.cpp leaves open: flash attention, and fewer threads than idle cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from time import perf_counter

from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import ROOM, RuntimeSettings, idle_cores, measured_lengths
from edgespec.core.protocols import NO_DRAFT, CheckCancelled, Draft
from edgespec.core.verify import read_prompt
from edgespec.errors import BackendError

_SHORT = 128  # cells for threads alone
_ROWS = (1, 4)  # of a forward whose threads are chosen: without a draft, and with a usual one
_MAX_ROUNDS = 25
_MIN_ROUNDS = 3  # to choose anything
_MIN_GAIN = 1.05  # of speed, for another number of threads
_MIN_FLASH_GAIN = 1.1  # for another kind of attention, which changes the rounding: a close measurement decides nothing
_MAX_GAIN = 1.6  # fewer threads that gain more have shown that the cores were not idle
_MAX_STEP_S = 0.25  # of a forward of one row, in the shortest measurement; longer ones allow longer steps


class SettingsMeasurement:
    """One measurement of a model's settings, for about `seconds` in all."""

    def __init__(self, model: LlamaModel, seconds: float, check: CheckCancelled) -> None:
        self._model = model
        self._given = model.options
        self._seconds = seconds
        self._check = check
        vocab = model.tokenizer.vocab_size
        self._tokens = [(i * 7919 + 11) % vocab for i in range(max(_ROWS))]

    def run(self) -> RuntimeSettings | None:
        """Measures the settings that are open, and leaves the model with those that it had."""
        options = self._given
        has_choice = options.flash_attention is None and options.kv_type == "f16" and not options.exact
        lengths = measured_lengths(options, self._model.context_size) if has_choice else ()
        most = idle_cores()
        fewer = [] if options.threads or options.batch_threads else sorted({n for n in (most - 1, most // 2) if n > 0})
        if self._model.is_recurrent or not (lengths or fewer):
            return None
        with ExitStack() as closing:
            closing.callback(self._model.use, RuntimeSettings())
            try:
                return self._measure(lengths, fewer, closing)
            except BackendError:  # no memory for the contexts
                return RuntimeSettings()

    def _measure(self, lengths: Sequence[int], fewer: Sequence[int], closing: ExitStack) -> RuntimeSettings | None:
        settings, started = RuntimeSettings(), perf_counter()
        cells = lengths[0] + ROOM if lengths else _SHORT
        session = self._open(settings, cells, closing)
        if self._time_step(session) > max(_MAX_STEP_S, self._seconds / 4):
            return settings
        if lengths and session.extend(lengths[0]) < lengths[0]:
            lengths = ()  # llama.cpp cannot copy cells of this model
        if not (lengths or fewer):
            return None
        parts = len(lengths) + (len(_ROWS) if fewer else 0)
        until = [started + self._seconds * (i + 1) / parts for i in range(parts)]
        if lengths:
            other = self._open(RuntimeSettings(flash_attention=False), cells, closing)
            read_prompt(other, self._tokens[:1])
            speeds = {n: self._compare_at(n, session, other, until.pop(0)) for n in lengths}
            is_faster = math.prod(speeds.values()) ** (1 / len(speeds)) >= _MIN_FLASH_GAIN
            settings = replace(settings, flash_attention=False if is_faster else None, without_flash=speeds)
            session = other if is_faster else session
        if fewer:
            chosen = {rows: self._compare_threads(session, rows, fewer, until.pop(0)) for rows in _ROWS}
            (one, _), (many, _) = chosen.values()
            gains = {rows: gain for rows, (_, gain) in chosen.items() if gain}
            settings = replace(settings, threads=one, batch_threads=many, with_fewer_threads=gains)
        return settings

    def _open(self, settings: RuntimeSettings, cells: int, closing: ExitStack) -> LlamaSession:
        self._model.use(settings)
        session = self._model.open_as(LlamaSession, self._check, cells)
        closing.callback(session.close)
        return session

    def _time_step(self, session: LlamaSession) -> float:
        """Seconds of a forward of one row; the session then holds a token."""
        read_prompt(session, self._tokens[:1])
        return self._time(session, 1, 1)

    def _compare_at(self, length: int, default: LlamaSession, other: LlamaSession, until: float) -> float:
        """The speed of `other` over that of `default` in forwards of one row after `length` tokens."""
        for session in (default, other):
            session.rewind(length)
            if session.position < length:
                session.extend(length)
                self._time(session, length, 1)  # this forward rotates the keys of the copies
        arms = (default, other)
        gains: list[float] = []
        while len(gains) < _MIN_ROUNDS or (len(gains) < _MAX_ROUNDS and perf_counter() < until):
            self._check()
            order = (0, 1) if len(gains) % 2 else (1, 0)
            taken = {arm: self._time(arms[arm], length, 1) for arm in order}
            gains.append(taken[0] / taken[1])
        return median(gains)

    def _compare_threads(
        self, session: LlamaSession, rows: int, fewer: Sequence[int], until: float
    ) -> tuple[int | None, float]:
        """(the faster number of threads or None, its speed over that with all idle cores; 0 if unknown)."""
        counts = (idle_cores(), *fewer)
        at = session.position
        times: dict[int, list[float]] = {n: [] for n in counts}
        while len(times[counts[0]]) < _MAX_ROUNDS and perf_counter() < until:
            for n in counts:
                self._check()
                session.api.llama_set_n_threads(session.context.native.handle, n, n)
                times[n].append(self._time(session, at, rows))
        if len(times[counts[0]]) < _MIN_ROUNDS:
            return None, 0.0
        speeds = {n: median(a / b for a, b in zip(times[counts[0]], times[n], strict=True)) for n in fewer}
        best = max(fewer, key=lambda n: speeds[n])
        if speeds[best] > _MAX_GAIN:
            return None, 0.0
        return best if speeds[best] >= _MIN_GAIN else None, speeds[best]

    def _time(self, session: LlamaSession, at: int, rows: int) -> float:
        """Seconds of a forward of `rows` rows after `at` tokens."""
        session.rewind(at)
        draft = Draft.chain(self._tokens[1:rows]) if rows > 1 else NO_DRAFT
        started = perf_counter()
        session.forward(self._tokens[0], draft)
        seconds = perf_counter() - started
        session.commit(())
        return seconds
