"""Measures the settings that llama.cpp leaves open: flash attention, and fewer threads than idle cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import idle_cores
from edgespec.backends.settings import ROOM, RuntimeSettings, measured_lengths
from edgespec.cancel import check_cancelled
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.errors import BackendError

K = TypeVar("K")
_SHORT = 128  # cells for threads alone
_ROWS = (1, 4)  # of a forward whose threads are chosen: without a draft, and with a usual one
_MAX_ROUNDS = 25
_MIN_ROUNDS = 3  # to choose anything
_MIN_GAIN = 1.05  # least gain in speed for which another number of threads is chosen
_MIN_FLASH_GAIN = 1.1  # for another kind of attention, which changes the rounding: a close measurement decides nothing
_MAX_GAIN = 1.6  # fewer threads that gain more have shown that the cores were not idle
_MAX_STEP_S = 0.25  # nothing is measured if a forward of one row takes longer; long measurements allow longer ones


class SettingsMeasurement:
    """One measurement of a model's settings, for about `seconds` in all."""

    def __init__(self, model: LlamaModel, seconds: float) -> None:
        self._model = model
        self._given = model.options
        self._seconds = seconds
        self._tokens = [(i * 7919 + 11) % model.tokenizer.vocab_size for i in range(max(_ROWS))]

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
        if self._time(session, 1, 1) > max(_MAX_STEP_S, self._seconds / 4):
            return settings
        if lengths and session.extend(lengths[0]) < lengths[0]:
            lengths = ()  # llama.cpp cannot copy cells of this model
        if not (lengths or fewer):
            return None
        parts = len(lengths) + (len(_ROWS) if fewer else 0)
        until = iter([started + self._seconds * (i + 1) / parts for i in range(parts)])
        if lengths:
            other = self._open(RuntimeSettings(flash_attention=False), cells, closing)
            speeds = {n: self._compare_at(n, session, other, next(until)) for n in lengths}
            is_faster = math.prod(speeds.values()) ** (1 / len(speeds)) >= _MIN_FLASH_GAIN
            settings = replace(settings, flash_attention=False if is_faster else None, without_flash=speeds)
            session = other if is_faster else session
        if fewer:
            chosen = {rows: self._choose_threads(session, rows, fewer, next(until)) for rows in _ROWS}
            (one, _), (many, _) = chosen.values()
            gains = {rows: gain for rows, (_, gain) in chosen.items() if gain}
            settings = replace(settings, threads=one, batch_threads=many, with_fewer_threads=gains)
        return settings

    def _open(self, settings: RuntimeSettings, cells: int, closing: ExitStack) -> LlamaSession:
        """A session that holds a token."""
        self._model.use(settings)
        session = self._model.open_as(LlamaSession, cells)
        closing.callback(session.close)
        read_prompt(session, self._tokens[:1])
        return session

    def _compare_at(self, length: int, default: LlamaSession, other: LlamaSession, until: float) -> float:
        """The speed of `other` over that of `default` in forwards of one row after `length` tokens."""
        for session in (default, other):
            session.rewind(length)
            if session.position < length:
                session.extend(length)
                self._time(session, length, 1)  # this forward rotates the keys of the copies
        arms = {each: partial(self._time, each, length, 1) for each in (default, other)}
        return self._compare(arms, until, _MIN_ROUNDS)[other]

    def _choose_threads(
        self, session: LlamaSession, rows: int, fewer: Sequence[int], until: float
    ) -> tuple[int | None, float]:
        """(the faster number of threads or None, its speed over that with all idle cores; 0 if unknown)."""
        arms = {n: partial(self._time, session, session.position, rows, n) for n in (idle_cores(), *fewer)}
        speeds = self._compare(arms, until, 0)
        best = max(fewer, key=lambda n: speeds.get(n, 0.0))
        gain = speeds.get(best, math.inf)
        if gain > _MAX_GAIN:
            return None, 0.0
        return best if gain >= _MIN_GAIN else None, gain

    def _compare(self, arms: Mapping[K, Callable[[], float]], until: float, least: int) -> dict[K, float]:
        """The speed of each arm over that of the first, the median of rounds, in which they take turns.

        There are `least` rounds even if the time does not suffice; nothing is said of fewer than three.
        """
        times: dict[K, list[float]] = {arm: [] for arm in arms}
        first, *others = arms
        while (done := len(times[first])) < least or (done < _MAX_ROUNDS and perf_counter() < until):
            check_cancelled()
            for arm in [first, *others] if done % 2 else [*others, first]:
                times[arm].append(arms[arm]())
        if len(times[first]) < _MIN_ROUNDS:
            return {}
        return {arm: median(a / b for a, b in zip(times[first], times[arm], strict=True)) for arm in others}

    def _time(self, session: LlamaSession, at: int, rows: int, threads: int | None = None) -> float:
        """Seconds of a forward of `rows` rows after `at` tokens."""
        if threads is not None:
            session.api.llama_set_n_threads(session.context.native.handle, threads, threads)
        session.rewind(at)
        draft = Draft.chain(self._tokens[1:rows]) if rows > 1 else NO_DRAFT
        started = perf_counter()
        session.forward(self._tokens[0], draft)
        seconds = perf_counter() - started
        session.commit(())
        return seconds
