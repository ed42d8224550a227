"""Settings of a runtime that the user left open, as measured for a model on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.backends.options import LoadOptions

ROOM = 72  # cells behind the text, for the rows of a forward
_LONG, _SHORT = 1500, 100  # tokens of context at which settings are measured
LONGEST = _LONG + ROOM
"""Cells of a context in which settings are measured, at most; two are open at a time."""

_MIN_LONG = 192  # tokens; below, attention takes too little of a forward to be measured


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Choices that differ from the runtime's own, None if they do not, and the measured speeds behind them.

    threads, batch_threads  of forwards of one row, and of more
    without_flash           speed without flash attention over the speed with it, by tokens of context
    with_fewer_threads      speed with the fastest smaller number of threads over that with all idle cores, by rows
    """

    flash_attention: bool | None = None
    threads: int | None = None
    batch_threads: int | None = None
    without_flash: Mapping[int, float] = field(default_factory=dict)
    with_fewer_threads: Mapping[int, float] = field(default_factory=dict)

    def apply(self, options: LoadOptions) -> LoadOptions:
        """`options` with these settings where the user has set nothing."""
        return replace(
            options,
            flash_attention=self.flash_attention if options.flash_attention is None else options.flash_attention,
            threads=options.threads or self.threads,
            batch_threads=options.batch_threads or self.batch_threads,
        )

    def override(self, options: LoadOptions) -> RuntimeSettings:
        """These settings with those of `options` in their place where the user has set some."""
        used = self.apply(options)
        return replace(self, **{name: getattr(used, name) for name in _CHOICES})

    @property
    def chosen(self) -> dict[str, bool | int | None]:
        """The choices by the names of their options; None if the runtime decides."""
        return {name: getattr(self, name) for name in _CHOICES}

    def describe(self) -> list[str]:
        """One line for each measured setting, such as 'flash attention off: 1.30x at 1,500 tokens'."""
        lines = []
        if self.without_flash:
            speeds = ", ".join(f"{speed:.2f}x at {n:,} tokens" for n, speed in sorted(self.without_flash.items()))
            chosen = "off" if self.flash_attention is False else "as llama.cpp decides; off"
            lines.append(f"flash attention {chosen}: {speeds}")
        if self.with_fewer_threads:
            speeds = ", ".join(f"{speed:.2f}x for {n} rows" for n, speed in sorted(self.with_fewer_threads.items()))
            one, many = self.threads or "all idle cores", self.batch_threads or "all idle cores"
            lines.append(f"threads {one} for one row, {many} for more; fewer: {speeds}".replace("1 rows", "1 row"))
        return lines

    @classmethod
    def from_dict(cls, stored: Any) -> RuntimeSettings:
        """Raises ValueError for what `asdict` does not give."""
        try:
            speeds = [{int(n): float(x) for n, x in stored[name].items()} for name in _SPEEDS]
            flash, threads, batch = (stored[name] for name in _CHOICES)
            is_sound = (flash is None or type(flash) is bool) and all(
                n is None or (type(n) is int and 1 <= n <= 512) for n in (threads, batch)
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("not runtime settings") from error
        if not is_sound or not all(0 < each < math.inf for table in speeds for each in table.values()):
            raise ValueError("runtime settings out of range")
        return cls(flash, threads, batch, *speeds)


def measured_lengths(options: LoadOptions, context_size: int) -> tuple[int, ...]:
    """(long, short) tokens of context at which flash attention is measured; none if all contexts are short.

    A forward's time grows linearly between them. Two contexts of that length take no more memory than the model's own
    cache, which is not allocated yet.
    """
    most = min(context_size, context_size * options.caches // 2) - ROOM
    return (min(_LONG, most), _SHORT) if most >= _MIN_LONG else ()


_CHOICES = ("flash_attention", "threads", "batch_threads")
_SPEEDS = ("without_flash", "with_fewer_threads")
