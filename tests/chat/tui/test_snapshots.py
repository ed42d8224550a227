"""What the screens look like, as SVG files in snapshots/; EDGESPEC_UPDATE_SNAPSHOTS=1 writes them anew."""

from __future__ import annotations

import difflib
import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, TabbedContent

from edgespec.chat import Conversation, Turn
from edgespec.chat.tui.app import ChatApp
from edgespec.chat.tui.picker import Picker, Row
from edgespec.chat.tui.race import Race
from edgespec.core.protocols import Step
from tests.chat.tui.driving import in_loop, until
from tests.chat.tui.screens import Script, exported, finished, lines_of, opened, pieces_of, rounds, within

SNAPSHOTS = Path(__file__).parent / "snapshots"

THOUGHT = "The user wants the numbers below n. A generator keeps two of them at a time, which is enough.\n"
ANSWER = """\
A **generator** keeps only two numbers at a time, so it also works for a large `n`:

```python
def fibonacci(n: int) -> Iterator[int]:
    a, b = 0, 1
    while a < n:
        yield a
        a, b = b, a + b
```

1. Each step costs one addition.
2. The numbers grow by about 1.618 a step, so that `n` is reached soon.

> Call `list(fibonacci(100))` to see them all at once
"""
QUESTION = "How do I list the Fibonacci numbers below n?\nWith a generator, please."

Show = Callable[[ChatApp, Pilot[None], Script], Awaitable[None]]


async def start(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    app.refresh_instruments()


async def streaming(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    events = rounds([*pieces_of(THOUGHT, "reasoning"), *pieces_of(ANSWER)])
    script.generations, script.holds = [events], True
    await app.ask(QUESTION)
    await until(lambda: app.activity.meter.emitted_tokens == sum(len(e.tokens) for e in events if isinstance(e, Step)))
    await until(lambda: app.activity.answer is not None and app.activity.answer.text == ANSWER)


async def token_colors(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    await streaming(app, pilot, script)
    await pilot.press("ctrl+t", "ctrl+o")


async def answered(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    events = rounds(pieces_of(ANSWER))
    script.generations = [[*events, finished(events)]]
    await app.ask(QUESTION)
    await until(lambda: app.activity.job is None)


async def steps(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    await answered(app, pilot, script)
    lookups = within(app).engine.draft_stats.drafter("ngram; greedy, answer", "length").acceptance
    for length in range(1, 17):
        for i in range(10):
            lookups.observe(length, i < length // 2 + 2)
    await pilot.press("f2")
    await until(lambda: app.screen.query_one(TabbedContent).tab_count == 3)


async def race(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    plain = rounds([piece._replace(drafter="") for piece in pieces_of(ANSWER)], drafted=0)
    fast = rounds(pieces_of(ANSWER))
    script.generations = [[*fast, finished(fast)], [*plain, finished(plain)]]
    await app.run_command("race Fibonacci, please")
    await pilot.pause()
    assert isinstance(app.screen, Race)
    await until(lambda: "the same text" in str(app.screen.query_one("#race-result").visual))


ROWS_OF_MODELS = [
    Row("gpt-oss-20b", "gpt-oss-20b", ("~11.8 GiB", "fits", "24", "", "strong", "Apache 2.0", "GPT-OSS 20B"),
        12_670_000_000),
    Row("qwen-14b-q4", "qwen-14b-q4", ("here", "tight", "11", "12-19", "good", "Apache 2.0", "Qwen3 14B, 4-bit")),
    Row("python-6m", "python-6m", ("here", "fits", "1,451", "no gain", "toy", "MIT",
        "Completes Python code; embedded")),
    Row("llama-70b-q4", "llama-70b-q4", ("~39.9 GiB", "no", "", "draft model", "best", "Llama 3.3", "Llama 3.3 70B"),
        42_800_000_000),
    Row("me/a.gguf", "hf:someone/A-Rather-Long-Name-Instruct-GGUF/a-file-Q4_K_M.gguf", ("41.0 GiB", "no", "",
        "", "", "", "downloaded")),
    Row("ollama", "ollama: gemma3:4b", ("3.1 GiB", "fits", "", "", "", "", "from another program")),
]  # fmt: skip


async def picker(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    await pilot.press("ctrl+g")
    assert isinstance(app.screen, Picker)
    await until(lambda: app.screen.query_one(DataTable).row_count == len(ROWS_OF_MODELS))


async def history(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
    asked = ["How do I list the Fibonacci numbers?", "写一个快速排序 in Python 🙂", "Explain this traceback, " * 9]
    for day, text in enumerate(asked, 1):
        when = datetime(2026, 3, day, 14, 5).timestamp()
        model = ("python-6m", "hf:someone/A-Long-Name-GGUF/a-file.gguf", "qwen-14b-q4")[day - 1]
        conversation = Conversation(0, "", False, model, None, 1, when, when)
        app.recorder.store.insert(conversation, [Turn(1, 0, None, "user", text, "", [], {}, {}, True, when)])
    await pilot.press("ctrl+r")


def themed(name: str) -> Show:
    async def show(app: ChatApp, pilot: Pilot[None], script: Script) -> None:
        app.theme = name
        await token_colors(app, pilot, script)
        await pilot.press("ctrl+o")
        await app.show_notice("the engine is busy. Esc stops it.", "error")

    return show


SCREENS: dict[str, tuple[Show, tuple[int, int]]] = {
    "start": (start, (80, 24)),
    "streaming": (streaming, (200, 60)),
    "steps": (steps, (120, 40)),
    "race": (race, (120, 40)),
    "picker": (picker, (120, 40)),
    "history": (history, (80, 24)),
    "light": (themed("textual-light"), (120, 40)),
    "contrast": (themed("high-contrast"), (80, 24)),
}


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.chat.tui.picker.list_rows", lambda *_, **_options: iter([(ROWS_OF_MODELS, "")]))


@pytest.mark.parametrize("name", SCREENS)
@in_loop
async def test_screen(name: str, script: Script, tmp_path: Path) -> None:
    show, size = SCREENS[name]
    async with opened(size) as (app, pilot):
        await show(app, pilot, script)
        changes = changed(await exported(app, pilot), f"{name}.svg", tmp_path)
    if changes:
        pytest.fail("\n".join(changes), pytrace=False)


@in_loop
async def test_costs_and_acceptance(script: Script) -> None:
    async with opened((120, 70)) as (app, pilot):
        await steps(app, pilot, script)
        await until(lambda: "A plain decode step" in str(app.screen.query_one("#costs").render()))
        costs, acceptance = (str(app.screen.query_one(id).render()) for id in ("#costs", "#acceptance"))
    for text in ("A plain decode step takes 80.0 ms.", " 3.00", "Tokens drafted by pard, in plain steps: 0.075 for 1"):
        assert text in costs
    for text in ("Acceptance by draft depth, in this answer:", "by match length, over all texts (ngram;"):
        assert text in acceptance


def changed(svg: str, name: str, tmp_path: Path) -> list[str]:
    """In which lines `svg` differs from the file of that name; or write that."""
    kept = SNAPSHOTS / name
    if os.environ.get("EDGESPEC_UPDATE_SNAPSHOTS"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(svg, encoding="utf-8")
        return []
    before = kept.read_text(encoding="utf-8") if kept.exists() else ""
    if svg == before:
        return []
    written = tmp_path / name
    written.write_text(svg, encoding="utf-8")
    lines = list(difflib.unified_diff(lines_of(before), lines_of(svg), str(kept), str(written), lineterm="", n=1))
    return [f"{name} has changed; the new one is {written}", *(lines or ["the text is the same, its colours are not"])]
