"""The instruments: a panel beside the conversation, or one status line on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Digits, Static

from edgespec.backends.devices import DeviceMemory
from edgespec.hub.reference import shorten_names
from edgespec.service.client import ModelInfo
from edgespec.tui.bars import draw_column
from edgespec.tui.live_stats import LiveStats

_CELLS = 31  # of a line
_DEPTH_CELLS = 16
_MAX_DEPTHS = 6
_STRONG, _BAD = "bold $foreground", "$text-warning"
_DRAFT, _VERIFY, _OTHER = "$text-accent", "$text-primary", "$foreground 40%"

Part = str | tuple[str, str]
"""A text, or a text and its style."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The model and the memory of the machine.

    context_size  tokens
    resident      bytes of memory that this program uses
    available     bytes of free memory
    parts         (name, bytes) of target, KV cache and draft, as estimated before loading
    devices       accelerators with their free memory
    remembered    tokens of earlier texts that this conversation may be drafted from; None where the memory is off
    """

    name: str
    draft: str
    is_paused: bool
    context_size: int
    resident: int
    available: int
    parts: tuple[tuple[str, int], ...] = ()
    devices: tuple[DeviceMemory, ...] = ()
    remembered: int | None = None


def read_status(model_info: ModelInfo, resident: int, *, is_incognito: bool = False) -> ModelStatus:
    """Read the free memory now; `resident` is in bytes."""
    parts: list[tuple[str, int]] = []
    if (fit := model_info.fit) is not None:
        parts = [("target", fit.target.weights), ("KV", fit.target.kv)]
        if fit.draft is not None:
            parts.append(("draft", fit.draft.total))
    return ModelStatus(
        shorten_names(model_info.name),
        shorten_names(model_info.draft),
        model_info.is_paused,
        model_info.context_size,
        resident,
        psutil.virtual_memory().available,
        tuple(parts),
        model_info.devices,
        None if is_incognito else model_info.remembered,
    )


class Panel(VerticalScroll):
    """Speed, drafting, where the time goes, and the model; a box for each."""

    def __init__(self) -> None:
        super().__init__(id="panel", can_focus=False)
        self._gain = Digits("", id="gain")
        self._speeds = Static("", id="speeds")
        self._pace = Static("")
        self._drafting = _make_box("Drafting")
        self._time = _make_box("Time")
        self._model = _make_box("Model")

    def compose(self) -> ComposeResult:
        with Vertical(classes="section") as box:
            box.border_title = "Speed"
            with Horizontal(id="headline"):
                yield self._gain
                yield self._speeds
            yield self._pace
        yield self._drafting
        yield self._time
        yield self._model

    def show(self, stats: LiveStats, status: ModelStatus) -> None:
        gain = stats.times_plain
        self._gain.display = gain is not None
        if gain is not None:
            self._gain.update(f"{gain:.2f}x")
            self._gain.set_class(gain < 1, "loss")
        self._speeds.update(_describe_speeds(stats))
        self._pace.display = bool(stats.speeds)
        self._pace.update(_describe_pace(stats))
        self._drafting.update(_describe_drafting(stats, status))
        self._time.display = stats.forwards > 0
        self._time.update(_describe_times(stats))
        self._model.update(_describe_model(stats, status))


class StatusLine(Static):
    """The most important numbers of the panel in one line."""

    def __init__(self) -> None:
        super().__init__("", id="status-line", markup=False)

    def show(self, stats: LiveStats, status: ModelStatus) -> None:
        parts = []
        if stats.times_plain is not None:
            parts.append(f"{stats.times_plain:.2f}x plain")
        if stats.mean_speed is not None:
            parts.append(f"{stats.mean_speed:.1f} tok/s")
        if stats.acceptance.rate is not None:
            parts.append(f"{stats.acceptance.rate:.0%} accepted")
        parts.append(f"{stats.context_used:,}/{status.context_size:,}")
        parts.append(f"draft {status.draft}{' (off)' if status.is_paused else ''}")
        self.update(Content(" · ".join(parts)), layout=False)


def _make_box(title: str) -> Static:
    box = Static("", classes="section")
    box.border_title = title
    return box


def _describe_speeds(stats: LiveStats) -> Content:
    """In tokens/s: the mean of the answer, plain decoding, the last steps."""
    if stats.mean_speed is None:
        return Content("Ask something to measure it.")
    lines: list[tuple[Part, ...]] = [((f"{stats.mean_speed:.1f} tok/s", _STRONG),)]
    if stats.plain_speed is not None:
        lines.append((f"plain {stats.plain_speed:.1f}",))
    if stats.recent_speed is not None:
        lines.append((f"now {stats.recent_speed:.1f}",))
    return _join(lines)


def _describe_pace(stats: LiveStats) -> Content:
    lines: list[tuple[Part, ...]] = []
    if stats.times_plain is not None:
        lines.append(("the speed of plain decoding",))
    if stats.speeds:
        lines.append(((_draw_sparkline(stats.speeds, max(stats.speeds)), _VERIFY),))
    return _join(lines)


def _describe_drafting(stats: LiveStats, status: ModelStatus) -> Content:
    draft = status.draft.replace("+", " + ")  # so that lines break between drafters
    lines: list[tuple[Part, ...]] = [((draft, _STRONG), (", switched off" if status.is_paused else "", _BAD))]
    texts = "no memory of earlier texts" if status.remembered is None else f"{status.remembered:,} remembered tokens"
    lines.append((texts,))
    if stats.acceptance.rate is not None:
        lines.append(((f"{stats.acceptance.rate:.0%}", _STRONG), " of drafted tokens accepted"))
    if stats.tau is not None:
        lines.append(((f"{stats.tau:.2f}", _STRONG), " tokens per step"))
    if stats.acceptance_rates:
        lines.append(((_draw_sparkline(stats.acceptance_rates, 1.0), _DRAFT),))
    for depth, rate in enumerate(stats.acceptance.by_depth[:_MAX_DEPTHS], 1):
        lines.append(
            (f"depth {depth} ", (f"{'━' * round(rate * _DEPTH_CELLS):{_DEPTH_CELLS}}", _DRAFT), f" {rate:4.0%}")
        )
    if stats.steps and (decision := stats.steps[-1].decision) is not None:
        now = f"now {decision.source}, {stats.steps[-1].n_drafted} drafted: "
        lines.append((now, decision.reason))
    return _join(lines)


def _describe_times(stats: LiveStats) -> Content:
    """Shares of drafting, verifying and everything else; the time of the first token."""
    shares = [*zip(("draft", "verify", "other"), stats.times.shares, (_DRAFT, _VERIFY, _OTHER), strict=True)]
    ttft = "-" if stats.ttft_s is None else f"{stats.ttft_s * 1000:.0f} ms"
    return _join(
        [
            tuple(("━" * max(1, round(share * (_CELLS - 2))), style) for _, share, style in shares),
            tuple((f"{name} {share:.0%} ", style) for name, share, style in shares),
            ("first token ", ttft),
        ]
    )


def _describe_model(stats: LiveStats, status: ModelStatus) -> Content:
    lines: list[tuple[Part, ...]] = [((status.name, _STRONG),)]
    lines.append(("context ", f"{stats.context_used:,}", f" of {status.context_size:,}"))
    if status.context_size:
        n_full = round(stats.context_used / status.context_size * _CELLS)
        lines.append((("━" * n_full, _VERIFY), ("━" * (_CELLS - n_full), _OTHER)))
    free = f", {_format_size(status.available)} free"
    lines.append(("memory ", _format_size(status.resident), free))
    lines += [(f"  {name:6} {_format_size(size):>9}",) for name, size in status.parts]
    for device in status.devices:
        used = _format_size(device.total - device.free)
        lines.append((f"{device.name}\n  {used} of {_format_size(device.total)}",))
    return _join(lines)


def _join(lines: Iterable[tuple[Part, ...]]) -> Content:
    return Content("\n").join(Content.assemble(*line) for line in lines)


def _draw_sparkline(values: Iterable[float], top: float) -> str:
    return "".join(draw_column(value / top if top else 0.0) for value in list(values)[-_CELLS:])


def _format_size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
