"""The instruments: a panel beside the conversation, or one status line on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Digits, Static

from edgespec.answers.summary import describe_drafts, name_drafters
from edgespec.core.metrics import Meter, Metrics
from edgespec.engine.model_info import ModelInfo
from edgespec.models.fit import Fit
from edgespec.models.short_names import shorten_names


def draw_bar(share: float, width: int) -> str:
    """A horizontal bar of `width` cells; `share` is clipped to 0..1."""
    return ("█" * round(max(0.0, min(1.0, share)) * width)).ljust(width)


_CELLS = 31  # of a line
MAX_STEPS = 100  # of the latest ones that are shown
_STRONG, _BAD = "bold $foreground", "$text-warning"
_DRAFT, _VERIFY, _OTHER = "$text-accent", "$text-primary", "$foreground 40%"
Part = str | tuple[str, str]
"""A text, or a text and its style."""


class Panel(VerticalScroll):
    """Speed, drafting, where the time goes, and the model; a box for each."""

    def __init__(self) -> None:
        super().__init__(id="panel", can_focus=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="section") as box:
            box.border_title = "Speed"
            with Horizontal(id="headline"):
                yield Digits("", id="speed")
                yield Static("", id="speeds")
            yield Static("", id="pace")
        for title in ("Drafting", "Time", "Model"):
            section = Static("", id=title.lower(), classes="section")
            section.border_title = title
            yield section

    def show(self, meter: Meter, model_info: ModelInfo, resident: int, available: int, *, is_incognito: bool) -> None:
        """`resident` and `available` are the bytes that this program takes and that are free."""
        metrics, digits = meter.metrics(), self.query_one("#speed", Digits)
        digits.display = meter.tokens_per_second is not None
        if meter.tokens_per_second is not None:
            digits.update(f"{meter.tokens_per_second:.1f}")
        has_begun = metrics.target_forwards > 0
        self._fill("#speeds", _describe_speeds(meter))
        self._fill("#pace", _describe_pace(meter, model_info), is_shown=has_begun)
        self._fill("#drafting", _describe_drafting(meter, metrics, model_info, is_incognito=is_incognito))
        self._fill("#time", _describe_times(metrics), is_shown=has_begun)
        self._fill("#model", _describe_model(meter, model_info, resident, available))

    def _fill(self, id: str, content: Content, *, is_shown: bool = True) -> None:
        section = self.query_one(id, Static)
        section.display = is_shown
        section.update(content)


class StatusLine(Static):
    """The most important numbers of the panel in one line."""

    def __init__(self) -> None:
        super().__init__("", id="status-line", markup=False)

    def show(self, meter: Meter, model_info: ModelInfo) -> None:
        parts = []
        if meter.tokens_per_second is not None:
            parts.append(f"{meter.tokens_per_second:.1f} tok/s")
        if speedup := meter.speedup:
            parts.append(f"{speedup:.2f}x plain")
        if meter.acceptance_rate is not None:
            parts.append(f"{meter.acceptance_rate:.0%} accepted")
        if used := _count_used(meter, model_info):
            parts.append(f"{used:,}/{model_info.context_size:,}")
        parts.append(describe_drafts(model_info.draft, is_paused=model_info.is_paused))
        self.update(Content(" · ".join(parts)), layout=False)


def _describe_speeds(meter: Meter) -> Content:
    """The unit of the large number, which is the mean of the answer, and the speed of the last steps."""
    if meter.tokens_per_second is None:
        return Content("Ask something to measure it.")
    now = meter.recent_speed()
    return _join([(("tok/s", _STRONG),), *([(f"now {now:.1f}",)] if now is not None else [])])


def _describe_pace(meter: Meter, model_info: ModelInfo) -> Content:
    """The speedup and the speeds of the last steps, of which plain decoding has nothing to tell."""
    if not meter.drafted_tokens:
        can_draft = model_info.drafters and not model_info.is_paused
        return Content("plain decoding: drafts would not pay here" if can_draft else "plain decoding")
    n = len(meter.steps)
    speeds = [meter.recent_speed(end) or 0.0 for end in range(max(2, n - _CELLS + 1), n + 1)]
    speedup = meter.speedup
    lines: list[tuple[Part, ...]] = [((f"{speedup:.2f}x", _STRONG), " the speed of plain decoding")] if speedup else []
    return _join([*lines, ((_draw_sparkline(speeds, max(speeds, default=0.0)), _VERIFY),)])


def _describe_drafting(meter: Meter, metrics: Metrics, model_info: ModelInfo, *, is_incognito: bool) -> Content:
    draft = name_drafters(model_info.draft)
    lines: list[tuple[Part, ...]] = [((draft, _STRONG), (", switched off" if model_info.is_paused else "", _BAD))]
    if model_info.remembered and not is_incognito:
        lines.append((f"{model_info.remembered:,} tokens of earlier texts",))
    if metrics.acceptance_rate is not None:
        lines.append(((f"{metrics.acceptance_rate:.0%}", _STRONG), " of drafted tokens accepted"))
    if metrics.tau is not None and metrics.drafted_tokens:
        lines.append(((f"{metrics.tau:.2f}", _STRONG), " tokens per step"))
    if rates := [step.n_accepted / step.n_drafted for step in meter.steps[-MAX_STEPS:] if step.n_drafted]:
        lines.append(((_draw_sparkline(rates[-_CELLS:], 1.0), _DRAFT),))
    return _join(lines)


def _describe_times(metrics: Metrics) -> Content:
    """The time of the first token; if tokens are drafted, the shares of drafts, the model and everything else."""
    ttft = "-" if metrics.ttft_s is None else f"{metrics.ttft_s * 1000:.0f} ms"
    lines: list[tuple[Part, ...]] = [("first token after ", ttft)]
    if metrics.drafted_tokens:
        seconds = metrics.draft_s, metrics.verify_s, metrics.sample_s + metrics.commit_s
        total = sum(seconds) or 1.0
        names = zip(("drafts", "model", "rest"), (each / total for each in seconds), (_DRAFT, _VERIFY, _OTHER),
                    strict=True)  # fmt: skip
        shares = list(names)
        lines.append(tuple(("━" * max(1, round(share * (_CELLS - 2))), style) for _, share, style in shares))
        lines.append(tuple((f"{name} {share:.0%} ", style) for name, share, style in shares))
    return _join(lines)


def _describe_model(meter: Meter, model_info: ModelInfo, resident: int, available: int) -> Content:
    used, size = _count_used(meter, model_info), model_info.context_size
    n_full = round(used / size * _CELLS)
    lines: list[tuple[Part, ...]] = [((shorten_names(model_info.name), _STRONG),)]
    lines.append((f"context {used:,} of {size:,}" if used else f"context {size:,} tokens",))
    if used:
        lines.append((("━" * n_full, _VERIFY), ("━" * (_CELLS - n_full), _OTHER)))
    lines.append(("memory ", _format_size(resident), f", {_format_size(available)} free"))
    for device in model_info.devices:
        taken = _format_size(device.total - device.free)
        lines.append((f"{device.name}\n  {taken} of {_format_size(device.total)}",))
    return _join(lines)


def describe_memory(fit: Fit) -> str:
    """What the memory of a model is for, as estimated before loading."""
    parts = [("the model", fit.target.weights), ("its context", fit.target.kv)]
    parts += [("the draft", fit.draft.total)] if fit.draft is not None else []
    more = _format_size(fit.caches * fit.kv_for(8192))
    return f"Memory: {', '.join(f'{name} {_format_size(n)}' for name, n in parts)}; 8,192 more tokens take {more}."


def describe_reading(meter: Meter) -> str:
    """How much of the prompt was read before; empty before a prompt is read."""
    if meter.reading is None:
        return ""
    return f"Of {meter.prompt_tokens:,} tokens of the prompt {meter.reading.progress.reused:,} had been read before."


def _count_used(meter: Meter, model_info: ModelInfo) -> int:
    """The tokens in the context. The last token of an answer is not read, so it takes no place there."""
    return min(meter.prompt_tokens + meter.emitted_tokens, model_info.context_size)


def _join(lines: Iterable[tuple[Part, ...]]) -> Content:
    return Content("\n").join(Content.assemble(*line) for line in lines)


def _draw_sparkline(values: Iterable[float], top: float) -> str:
    return "".join("▁▂▃▄▅▆▇█"[round(7 * value / top) if top else 0] for value in values)


def _format_size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
