"""The instruments: a panel beside the conversation, or one status line on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
from rich.text import Text
from textual.widgets import Static

from edgespec.backends.devices import DeviceMemory
from edgespec.service.client import ModelInfo
from edgespec.tui.bars import draw_bar, draw_column
from edgespec.tui.live_stats import LiveStats

_SPARKLINE_CELLS = 32
_BAR_CELLS = 24
_MAX_DEPTHS = 8


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The model and the memory of the machine.

    context_size  tokens
    resident      bytes of memory that this program uses
    available     bytes of free memory
    parts         (name, bytes) of target, KV cache and draft, as estimated before loading
    devices       accelerators with their free memory
    """

    name: str
    draft: str
    is_paused: bool
    context_size: int
    resident: int
    available: int
    parts: tuple[tuple[str, int], ...] = ()
    devices: tuple[DeviceMemory, ...] = ()


def read_status(model_info: ModelInfo, resident: int) -> ModelStatus:
    """Read the free memory now; `resident` is in bytes."""
    parts: list[tuple[str, int]] = []
    if (fit := model_info.fit) is not None:
        parts = [("target", fit.target.weights), ("KV", fit.target.kv)]
        if fit.draft is not None:
            parts.append(("draft", fit.draft.total))
    return ModelStatus(
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
    """Speed, acceptance, the last decision, times, context and memory."""

    def __init__(self) -> None:
        super().__init__("", id="panel", markup=False)

    def show(self, stats: LiveStats, status: ModelStatus) -> None:
        text = Text()
        text.append(f"{status.name}\n", "bold")
        draft = status.draft.replace("+", " + ")  # so that lines break between drafters
        text.append(f"draft {draft}{', switched off' if status.is_paused else ''}\n\n", "dim")
        _add_speed(text, stats)
        _add_acceptance(text, stats)
        if stats.steps and (decision := stats.steps[-1].decision) is not None:
            text.append(f"\nnow: {decision.source}, {stats.steps[-1].n_drafted} drafted\n", "bold")
            text.append(f"{decision.reason}\n", "dim")
        _add_times(text, stats)
        _add_memory(text, stats, status)
        self.update(text, layout=False)


class StatusLine(Static):
    """The most important numbers of the panel in one line."""

    def __init__(self) -> None:
        super().__init__("", id="status-line", markup=False)

    def show(self, stats: LiveStats, status: ModelStatus) -> None:
        acceptance, tau = _format_percent(stats.acceptance.rate), _format_number(stats.tau, 2)
        line = (
            f"{_format_speed(stats)}  accepted {acceptance}  tau {tau}  {stats.context_used:,}/{status.context_size:,}"
            f"  draft {status.draft}{' (off)' if status.is_paused else ''}"
        )
        self.update(Text(line), layout=False)


def _add_speed(text: Text, stats: LiveStats) -> None:
    text.append(_format_speed(stats), "bold")
    text.append(f"\nnow {_format_number(stats.recent_speed)} tok/s, plain {_format_number(stats.plain_speed)}\n")
    if stats.speeds:
        text.append(_draw_sparkline(stats.speeds, max(stats.speeds)) + "\n", "green")


def _add_acceptance(text: Text, stats: LiveStats) -> None:
    text.append(f"\naccepted {_format_percent(stats.acceptance.rate)}   ", "cyan")
    text.append(f"tau {_format_number(stats.tau, 2)}\n", "magenta")
    if stats.acceptance_rates:
        text.append(_draw_sparkline(stats.acceptance_rates, 1.0) + "\n", "cyan")
    if stats.taus:
        text.append(_draw_sparkline(stats.taus, max(stats.taus)) + "\n", "magenta")
    for depth, rate in enumerate(stats.acceptance.by_depth[:_MAX_DEPTHS], 1):
        text.append(f"  depth {depth} ")
        text.append(draw_bar(rate, 12), "cyan")
        text.append(f" {rate:4.0%}\n")


def _add_times(text: Text, stats: LiveStats) -> None:
    if stats.forwards:
        draft, verify, other = stats.times.shares
        text.append("\ntime  ")
        text.append("█" * round(draft * _BAR_CELLS), "cyan")
        text.append("█" * round(verify * _BAR_CELLS), "green")
        text.append("█" * max(1, round(other * _BAR_CELLS)), "yellow")
        text.append(f"\ndraft {draft:.0%}", "cyan")
        text.append(f"  verify {verify:.0%}", "green")
        text.append(f"  other {other:.0%}\n", "yellow")
    ttft = "-" if stats.ttft_s is None else f"{stats.ttft_s * 1000:.0f} ms"
    text.append(f"\nfirst token {ttft}\n")


def _add_memory(text: Text, stats: LiveStats, status: ModelStatus) -> None:
    text.append(f"context {stats.context_used:,} of {status.context_size:,}\n")
    if stats.context_used and status.context_size:
        text.append(draw_bar(stats.context_used / status.context_size, _BAR_CELLS) + "\n", "magenta")
    text.append(f"\nmemory {_format_size(status.resident)}, free {_format_size(status.available)}\n")
    for name, size in status.parts:
        text.append(f"  {name:6} {_format_size(size):>9}\n", "dim")
    for device in status.devices:
        used = _format_size(device.total - device.free)
        text.append(f"{device.name}\n  {used} of {_format_size(device.total)}\n")


def _format_speed(stats: LiveStats) -> str:
    """Of the whole answer."""
    ratio = f"  {stats.times_plain:.2f}x plain" if stats.times_plain else ""
    return f"{_format_number(stats.mean_speed)} tok/s{ratio}"


def _draw_sparkline(values: Iterable[float], top: float) -> str:
    return "".join(draw_column(value / top if top else 0.0) for value in list(values)[-_SPARKLINE_CELLS:])


def _format_number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _format_size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
