"""The instruments beside a conversation, and the one line that stands for them where there is no room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
from rich.text import Text
from textual.widgets import Static

from edgespec.backends.devices import DeviceMemory
from edgespec.service.client import ModelInfo
from edgespec.tui.live_stats import LiveStats, bar, column

_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Readings:
    """What the instruments show beside the gauges: tokens and bytes.

    parts    what target, KV cache and draft were foretold to take
    devices  accelerators with their free memory
    """

    name: str
    draft: str
    is_paused: bool
    context_size: int
    resident: int
    available: int
    parts: tuple[tuple[str, int], ...] = ()
    devices: tuple[DeviceMemory, ...] = ()


def readings(model_info: ModelInfo, resident: int) -> Readings:
    """Read now; `resident` bytes are ours."""
    parts: list[tuple[str, int]] = []
    if (fit := model_info.fit) is not None:
        parts = [("target", fit.target.weights), ("KV", fit.target.kv)]
        if fit.draft is not None:
            parts.append(("draft", fit.draft.total))
    return Readings(
        model_info.name,
        model_info.draft,
        model_info.is_paused,
        model_info.context_size,
        resident,
        psutil.virtual_memory().available,
        tuple(parts),
        model_info.devices,
    )


class Panel(Static):
    """Speed against plain decoding, acceptance, the present decision, times, memory."""

    def __init__(self) -> None:
        super().__init__("", id="panel", markup=False)

    def show(self, live_stats: LiveStats, now: Readings) -> None:
        text = Text()
        text.append(f"{now.name}\n", "bold")
        text.append(f"draft {now.draft}{', switched off' if now.is_paused else ''}\n\n", "dim")
        text.append(_speed(live_stats), "bold")
        text.append(f"\nmean {_number(live_stats.mean)} tok/s, plain {_number(live_stats.plain)}\n")
        if live_stats.speeds:
            text.append(_spark(live_stats.speeds, max(live_stats.speeds)) + "\n", "green")
        text.append(f"\naccepted {_percent(live_stats.acceptance)}   ", "cyan")
        text.append(f"tau {_number(live_stats.tau, 2)}\n", "magenta")
        if live_stats.accepted_shares:
            text.append(_spark(live_stats.accepted_shares, 1.0) + "\n", "cyan")
        if live_stats.taus:
            text.append(_spark(live_stats.taus, max(live_stats.taus)) + "\n", "magenta")
        for depth, alpha in enumerate(live_stats.alphas[:8], 1):
            text.append(f"  depth {depth} ")
            text.append(bar(alpha, 12), "cyan")
            text.append(f" {alpha:4.0%}\n")
        if (decision := live_stats.decision) is not None:
            last = live_stats.rounds[-1]
            text.append(f"\nnow: {decision.source}, {last.n_drafted} drafted\n", "bold")
            text.append(f"{decision.reason}\n", "dim")
        if live_stats.forwards:
            draft_s, verify_s, other_s = live_stats.shares
            text.append("\ntime  ")
            text.append("█" * round(draft_s * 24), "cyan")
            text.append("█" * round(verify_s * 24), "green")
            text.append("█" * max(1, round(other_s * 24)), "yellow")
            text.append(f"\ndraft {draft_s:.0%}", "cyan")
            text.append(f"  verify {verify_s:.0%}", "green")
            text.append(f"  other {other_s:.0%}\n", "yellow")
        text.append(f"\nfirst token {_milliseconds(live_stats.ttft_s)}\n")
        text.append(f"context {live_stats.context_used:,} of {now.context_size:,}\n")
        if live_stats.context_used and now.context_size:
            text.append(bar(live_stats.context_used / now.context_size, 24) + "\n", "magenta")
        text.append(f"\nmemory {_size(now.resident)}, free {_size(now.available)}\n")
        for name, size in now.parts:
            text.append(f"  {name:6} {_size(size):>9}\n", "dim")
        for device in now.devices:
            text.append(f"{device.name}\n  {_size(device.total - device.free)} of {_size(device.total)}\n")
        self.update(text, layout=False)


class Strip(Static):
    """One line of the same."""

    def __init__(self) -> None:
        super().__init__("", id="strip", markup=False)

    def show(self, live_stats: LiveStats, now: Readings) -> None:
        line = (
            f"{_speed(live_stats)}  accepted {_percent(live_stats.acceptance)}  tau {_number(live_stats.tau, 2)}  "
            f"{live_stats.context_used:,}/{now.context_size:,}  draft {now.draft}{' (off)' if now.is_paused else ''}"
        )
        self.update(Text(line), layout=False)


def _speed(live_stats: LiveStats) -> str:
    times = f"  {live_stats.times_plain:.2f}x plain" if live_stats.times_plain else ""
    return f"{_number(live_stats.now)} tok/s{times}"


def _spark(values: Iterable[float], top: float) -> str:
    return "".join(column(value / top if top else 0.0) for value in list(values)[-_WIDTH:])


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _size(count: int) -> str:
    """Bytes in the unit that suits them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
