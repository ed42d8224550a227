"""Screens in a fixed state: generations as written down, readings that no machine decides, screens as text."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.cancel import check_cancelled
from edgespec.chat.tui.app import ChatApp
from edgespec.chat.tui.panel import Panel, StatusLine
from edgespec.chat.tui.transcript import Notice, Transcript
from edgespec.client.local import LocalEngine
from edgespec.client.stream import Stream
from edgespec.core.metrics import Meter
from edgespec.core.protocols import Decision, Step
from edgespec.engine.events import Event, Finished, Request
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.model_info import ModelInfo
from edgespec.machines.memory import DeviceMemory
from edgespec.models.fit import Fit, Memory, MemoryEstimate
from edgespec.models.load_config import LoadConfig
from edgespec.text.chat_template import PLAIN
from edgespec.text.stream import Piece
from edgespec.units import GIB
from tests.chat.tui.driving import chat_of, make_app, until

NOW_S = 100.0  # when every question is asked
TREE = LoadConfig(model="tree", backend="toy")
RESIDENT, AVAILABLE = 9_700_000_000, 21_300_000_000  # bytes
ROWS = {1: 0.080, 2: 0.083, 3: 0.086, 4: 0.092, 5: 0.105, 6: 0.112, 8: 0.130, 12: 0.190, 16: 0.240}

_TAG = re.compile(r'<text class="[^"]*" x="([\d.]+)" y="[\d.]+"[^>]*#terminal-line-(\d+)\)">(.*?)</text>', re.DOTALL)
_CELL = 12.2  # of an exported screen


class Script:
    """Generations in place of the engine's: the next list of events each time, and then, if `holds`, silence."""

    def __init__(self) -> None:
        self.generations: list[list[Event]] = []
        self.holds = False

    def stream(self, client: LocalEngine, _request: Request, _speculation: Speculation | None = None) -> Stream[Event]:
        def work() -> Iterator[Event]:
            yield from self.generations.pop(0)
            end = monotonic() + 30  # so that a test in which nothing stops it fails
            while self.holds and monotonic() < end:
                check_cancelled()
                sleep(0.01)

        return client.submit(work)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Answers come from here, at times from `NOW_S` on, and the instruments show a model that is not the toy."""

    def show_panel(panel: Panel, meter: Meter, model_info: ModelInfo, *_: int, is_incognito: bool) -> None:
        shown(panel, meter, describe(model_info), RESIDENT, AVAILABLE, is_incognito=is_incognito)

    script, shown, show_line = Script(), Panel.show, StatusLine.show
    monkeypatch.setattr(Panel, "show", show_panel)
    monkeypatch.setattr(StatusLine, "show", lambda line, meter, info: show_line(line, meter, describe(info)))
    monkeypatch.setattr(LocalEngine, "stream", lambda *arguments: script.stream(*arguments))
    monkeypatch.setattr("edgespec.chat.tui.dialogue.perf_counter", lambda: NOW_S)
    monkeypatch.setattr("edgespec.chat.tui.dialogue._REFRESH_INTERVAL_S", 0.0)
    return script


def describe(model_info: ModelInfo) -> ModelInfo:
    """A large model with a draft, on a GPU, in place of the toy."""
    return replace(
        model_info,
        name="qwen-14b-q4",
        drafters={"model": "Qwen/Qwen3-0.6B-GGUF:Q8_0"},
        context_size=8192,
        fit=Fit(8192, 1, MemoryEstimate(8_988_110_000, 1_342_177_280, 0), MemoryEstimate(805_000_000, 0, 0), Memory(0)),
        devices=(DeviceMemory("NVIDIA GeForce RTX 4070", 5 * GIB, 12 * GIB),),
        remembered=1_284_512,
    )


@asynccontextmanager
async def opened(
    size: tuple[int, int] = (120, 40), app: ChatApp | None = None
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """An app of that size, and what drives it, once the first model is open or refused."""
    app = app or make_app(TREE, chat=chat_of(64))
    async with app.run_test(size=size) as pilot:
        await until(lambda: app.activity.job is None)
        if app.client.model_info is not None:
            assert isinstance(app.client, LocalEngine)
            chat_info = replace(within(app).info, chat_template=PLAIN)  # its answers are Markdown
            app.client.loaded = replace(within(app), info=chat_info)
            within(app).engine.draft_stats = DraftStats(
                Profile(ROWS, {"model": DraftCost({1: 0.006}, 0.0004), "pard": DraftCost({1: 0.006, 8: 0.0085})})
            )
        await pilot.pause()
        yield app, pilot


def within(app: ChatApp) -> LoadedModel:
    """What is open behind the screen."""
    assert isinstance(app.client, LocalEngine) and app.client.loaded is not None
    return app.client.loaded


async def exported(app: ChatApp, pilot: Pilot[None]) -> str:
    """The screen as SVG once it stands still, without a cursor that blinks and without numbers made of its content."""
    for widget in [*app.screen.query(TextArea), *app.screen.query(Input)]:
        widget.cursor_blink = False
    before, now = "", "-"
    while before != now:
        await pilot.pause(0.03)
        before, now = now, still(app)
    return now


def still(app: ChatApp) -> str:
    """The screen as SVG as it is now."""
    return re.sub(r"terminal-\d+", "terminal", app.export_screenshot(simplify=True))


def errors(app: ChatApp) -> list[str]:
    """The errors that stay in the conversation."""
    items = app.query_one(Transcript).items
    return [item.text for item in items if isinstance(item, Notice) and item.kind == "error"]


def toasts(app: ChatApp) -> list[str]:
    """What is, or would be, shown in the corner of the screen."""
    return [each.message for each in app._notifications]


def lines_of(svg: str) -> list[str]:
    """The text of an exported screen, line by line."""
    lines: dict[int, str] = {}
    for x, line, text in _TAG.findall(svg):
        at = round(float(x) / _CELL)
        lines[int(line)] = lines.get(int(line), "").ljust(at) + html.unescape(text).replace("\xa0", " ")
    return [lines.get(number, "").rstrip() for number in range(max(lines, default=-1) + 1)]


async def seen(app: ChatApp, pilot: Pilot[None]) -> str:
    """The text on the screen."""
    return "\n".join(lines_of(await exported(app, pilot)))


def rounds(pieces: list[Piece], drafted: int = 4, round_s: float = 0.1) -> list[Event]:
    """A generation of one token a piece: runs of drafted pieces, `drafted` at most, are accepted in one round."""
    events: list[Event] = [Step(0, (0,), 0, 0, 0, NOW_S + 0.42), pieces[0]]
    at_s, index, rest = NOW_S + 0.42, 0, pieces[1:]
    while rest:
        index += 1
        accepted = next((n for n, piece in enumerate(rest[:drafted]) if not piece.drafter), min(drafted, len(rest)))
        burst, rest = rest[: accepted + 1], rest[accepted + 1 :]
        source = next((piece.drafter for piece in burst if piece.drafter), "model")
        why = "a lookup is expected to pay" if source == "ngram" else (
            "the drafter is expected to win the most tokens/s")  # fmt: skip
        decision = Decision(source, why, 1 + 0.7 * accepted, round_s * 0.95, {"model": drafted})
        at_s += round_s * (1 + index % 3 / 10)
        events.append(
            Step(index, (0,) * len(burst), drafted, accepted, min(drafted, accepted + 1), at_s, 0.2 * round_s,
                 0.7 * round_s, 0.06 * round_s, 0.04 * round_s, decision, plain_steps=1.2),
        )  # fmt: skip
        events += burst
    return events


def finished(events: list[Event]) -> Finished:
    meter = Meter(12, NOW_S)
    steps = [event for event in events if isinstance(event, Step)]
    for step in steps:
        meter.add(step)
    tokens = tuple(token for step in steps for token in step.tokens)
    return Finished("stop", tokens, 1, meter.metrics())


def pieces_of(text: str, channel: Any = "answer") -> list[Piece]:
    """`text` in words with origins that take turns in runs of several lengths."""
    words = re.findall(r"\S+\s*|\s+", text)
    pattern = ["", "model", "model", "", "ngram", "ngram", "ngram", "ngram", "", "ngram+model", "model", "", ""]
    return [Piece(word, channel, pattern[i % len(pattern)]) for i, word in enumerate(words)]
