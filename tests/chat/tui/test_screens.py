"""Screens of other sizes, without colours, with much or strange text, and after something has gone wrong."""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter

import pytest
from rich.cells import cell_len
from textual.widgets import Static

from edgespec.backends.options import LoadOptions
from edgespec.chat.tui.panel import Panel, StatusLine
from edgespec.client.local import LocalEngine
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Event
from edgespec.models.load_config import LoadConfig
from edgespec.text.stream import Piece
from tests.chat.tui.driving import in_loop, make_app, until
from tests.chat.tui.screens import Script, finished, lines_of, opened, rounds, seen, still

STRANGE = (
    "[red]x[/red] [link=https://a.b]y[/link]",
    "bell \x07 escape \x1b[31mred\x1b[0m null \x00 return a\rb",
    "漢字かな交じり文" * 12,
    "👩‍👩‍👧 🇩🇪 e\u0301 \u200b wide ｗｉｄｅ",  # noqa: RUF001
    "x" * 5000,
)


def words(*texts: str) -> list[Event]:
    """A generation of these texts."""
    events = rounds([Piece(text, "answer", "model" if i % 3 else "") for i, text in enumerate(texts)])
    return [*events, finished(events)]


@in_loop
async def test_resized_while_an_answer_comes() -> None:
    app = make_app(LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=100_000)))
    app.chat.max_tokens = 50_000
    app.chat.sampling = SamplingParams(temperature=0.0, logit_bias=((10, 6.0), (256, -1000.0)))  # short paragraphs
    async with opened(app=app) as (app, pilot):
        await app.ask("more")
        for width, height in ((80, 24), (40, 12), (200, 60), (99, 30), (100, 30)):
            before = len(app.activity.answer.text) if app.activity.answer else 0
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            assert app.size == (width, height) and app.is_running
            is_narrow = width < 100
            assert app.query_one(StatusLine).display is is_narrow and app.query_one(Panel).display is not is_narrow
            assert app.screen.has_class("narrow") is is_narrow
            await until(lambda n=before: app.activity.answer is None or len(app.activity.answer.text) > n)
            assert app.activity.answer is not None, "it came to its end before all sizes were tried"
            lines = lines_of(still(app))
            assert len(lines) <= height and max(map(cell_len, lines)) <= width
        app.action_stop()
        await until(lambda: app.activity.job is None)


@in_loop
async def test_strange_text_is_shown_as_it_is(script: Script) -> None:
    script.generations = [words("`[red]x[/red]` ", *(f"\n\n{text}" for text in STRANGE))]
    async with opened((80, 100)) as (app, pilot):
        app.action_token_colors()
        await app.ask("\n".join(STRANGE[:4]))
        await until(lambda: app.activity.job is None)
        await app.add_notice(STRANGE[0])
        assert app.recorder.store.path(app.recorder.turns[-1])[0].text == "\n".join(STRANGE[:4])
        shown = await seen(app, pilot)
        raw = "".join(segment.text for strip in app.screen._compositor.render_strips() for segment in strip)
    assert shown.count("[red]x[/red]") == 5  # the title, the question, twice in the answer, the notice
    assert "漢字かな" in shown and "👩" in shown and "ｗｉｄｅ" in shown  # noqa: RUF001
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", raw), "a terminal would act on these"
    lines = shown.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert sum(line.count("x" * 70) for line in lines) >= 60, "long lines are wrapped, not cut"
    assert lines[-1].startswith(" ^q Quit"), "the footer is where it was"


@in_loop
async def test_an_unforeseen_error_of_a_job_is_reported(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with opened() as (app, pilot):
        monkeypatch.setattr(script, "generations", [[ZeroDivisionError("an accident")]])
        monkeypatch.setattr(LocalEngine, "stream", failing)
        await app.ask("go")
        await until(lambda: app.activity.job is None)
        await pilot.pause()
        assert "Internal error: ZeroDivisionError: an accident." in (await seen(app, pilot)).replace("\n", " ")
        (log,) = tmp_path.glob("edgespec-*.log")
        assert "in failing" not in log.read_text() and "an accident" in log.read_text()
        assert app.recorder.questions and app.is_running


def failing(client: LocalEngine, *_: object) -> object:
    def work() -> object:
        raise ZeroDivisionError("an accident")
        yield

    return client.submit(work)  # type: ignore[arg-type]


@in_loop
async def test_an_exception_ends_the_app_and_what_is_under_way(script: Script) -> None:
    """It is raised to whoever runs the app, with a return code, while an answer without an end is generated."""
    script.generations, script.holds = [words("one ", "two ", "three")[:-1]], True
    app, began_s = make_app(), perf_counter()
    with pytest.raises(ZeroDivisionError):
        async with opened(app=app) as (_, pilot):
            await app.ask("go")
            await until(lambda: app.activity.answer is not None and app.activity.answer.text)
            app.call_later(lambda: 1 // 0)
            await pilot.pause(0.2)
    assert perf_counter() - began_s < 25, "the answer was waited for"
    assert app.return_code == 1 and not app.is_running
    assert isinstance(app.client, LocalEngine)
    assert not app.client._worker._thread.is_alive(), "the worker has ended"
    with pytest.raises(Exception, match="closed"):
        app.recorder.store.recent()


@in_loop
@pytest.mark.parametrize("width", [99, 120])
@pytest.mark.parametrize("n_drafted", [0, 4])
async def test_a_speedup_is_told_of_answers_with_drafts(script: Script, width: int, n_drafted: int) -> None:
    events = rounds(
        [Piece(f"word{n} ", "answer", "model" if n_drafted and n % 3 else "") for n in range(60)], n_drafted
    )
    script.generations = [[*events, finished(events)]]
    async with opened((width, 40)) as (app, pilot):
        await app.ask("more")
        await until(lambda: app.activity.job is None)
        shown, pace = await seen(app, pilot), str(app.query_one("#pace", Static).content)
    assert "60 tokens" in shown and " tok/s" in shown
    assert bool(re.search(r"\d\.\d\dx plain", shown)) is bool(n_drafted)
    assert bool(re.search(r"\d\.\d\dx the speed of plain decoding", pace)) is bool(n_drafted)
    assert ("drafts would not pay" in pace) is (n_drafted == 0)
