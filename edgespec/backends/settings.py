"""Settings of a runtime that the user left open, as measured for a model on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import CheckCancelled

ROOM = 72  # cells behind the text, for the rows of a forward
_LONG, _SHORT = 1500, 100  # tokens of context at which settings are measured
_MIN_LONG = 192  # below it attention takes too little of a forward to be measured
_DEFAULT = "as llama.cpp decides"


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Choices that differ from the runtime's own, None where they do not, and the measured speeds behind them.

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

    @property
    def chosen(self) -> dict[str, bool | int | None]:
        """The choices by the names of their options; None where the runtime decides."""
        return {
            "flash_attention": self.flash_attention,
            "threads": self.threads,
            "batch_threads": self.batch_threads,
        }

    def describe(self) -> list[str]:
        """One line for each measured setting, such as 'flash attention off: 1.30x at 1,500 tokens'."""
        lines = []
        if self.without_flash:
            speeds = ", ".join(f"{speed:.2f}x at {n:,} tokens" for n, speed in sorted(self.without_flash.items()))
            chosen = "flash attention off" if self.flash_attention is False else f"flash attention {_DEFAULT}; off"
            lines.append(f"{chosen}: {speeds}")
        if self.with_fewer_threads:
            speeds = ", ".join(f"{speed:.2f}x for {n} rows" for n, speed in sorted(self.with_fewer_threads.items()))
            one, many = (str(n or "all idle cores") for n in (self.threads, self.batch_threads))
            lines.append(f"threads {one} for one row, {many} for more; fewer: {speeds}".replace("1 rows", "1 row"))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As JSON; see from_dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Any) -> RuntimeSettings:
        """Raises ValueError for what to_dict does not give."""
        try:
            settings = cls(
                stored["flash_attention"],
                stored["threads"],
                stored["batch_threads"],
                *({int(n): float(x) for n, x in stored[name].items()} for name in _SPEEDS),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("not runtime settings") from error
        counts = [each for each in (settings.threads, settings.batch_threads) if each is not None]
        speeds = [*settings.without_flash.values(), *settings.with_fewer_threads.values()]
        if (
            not isinstance(settings.flash_attention, bool | None)
            or not all(type(each) is int and 1 <= each <= 512 for each in counts)
            or not all(0 < each < math.inf for each in speeds)
        ):
            raise ValueError("runtime settings out of range")
        return settings


def measured_lengths(options: LoadOptions, context_size: int) -> tuple[int, ...]:
    """(long, short) tokens of context at which flash attention is measured; none where all contexts are short.

    A forward's time grows linearly between them. Two contexts of that length take no more memory than the model's own
    cache, which is not allocated yet.
    """
    most = min(context_size, context_size * options.caches // 2) - ROOM
    return (min(_LONG, most), _SHORT) if most >= _MIN_LONG else ()


_SPEEDS = ("without_flash", "with_fewer_threads")


@runtime_checkable
class Adjustable(Protocol):
    """A model whose runtime leaves settings open."""

    @property
    def options(self) -> LoadOptions:
        """What its sessions are opened with."""

    def use(self, settings: RuntimeSettings) -> None:
        """Open later sessions with `settings`, but for what the user has set."""

    def measure_settings(self, seconds: float, check: CheckCancelled) -> RuntimeSettings | None:
        """The fastest settings, measured for about `seconds` on sessions of their own.

        The runtime's own where there is no time or memory to measure, None where everything is set. Raises Cancelled.
        """
