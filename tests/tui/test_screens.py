"""Screens of other sizes, without colours, with much or strange text, and after something has gone wrong."""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter

import pytest
from rich.cells import cell_len

from edgespec.backends.options import LoadOptions
from edgespec.conversations import Store
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Event
from edgespec.planner.plan import LoadConfig
from edgespec.service.local import LocalEngine
from edgespec.text.stream import Piece
from edgespec.tui.panel import Panel, StatusLine
from edgespec.tui.transcript import Transcript
from edgespec.tui.turns import Notice
from tests.tui.screens import (
    TOY,
    Script,
    chat_app,
    exported,
    finished,
    in_loop,
    lines_of,
    opened,
    rounds,
    seen,
    still,
    toasts,
    until,
)

COLOUR = re.compile(r"#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})\b")
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
    app = chat_app(LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=100_000)))
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
async def test_a_window_keeps_its_place_when_resized() -> None:
    async with opened((200, 60)) as (app, pilot):
        await pilot.press("f1")
        await pilot.resize_terminal(40, 12)
        assert "Esc closes" in await seen(app, pilot)
        await pilot.press("escape")
        assert app.screen_stack[0].has_class("narrow") and len(app.screen_stack) == 1


def colours(svg: str) -> set[str]:
    """Colours of an exported screen that are no grey, without those of the window drawn around it."""
    drawn = re.sub(r"<circle[^>]*/>", "", svg)
    return {"#" + "".join(each) for each in COLOUR.findall(drawn) if len(set(each)) > 1}


@pytest.mark.parametrize("no_color", [False, True])
@in_loop
async def test_no_color(no_color: bool, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without colours, origins are still underlined and errors still marked."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    script.generations = [words("A ", "**word** ", "of ", "`code` ", "[x](http://a.b) ", "end")]
    async with opened() as (app, pilot):
        await app.ask("go")
        await until(lambda: app.activity.job is None)
        await app.add_notice("there is no such thing.", "error")
        svg = await exported(app, pilot)
        await pilot.press("ctrl+o")
        with_origins = await exported(app, pilot)
    greyish = colours(svg) | colours(with_origins)
    if not no_color:
        assert len(greyish) > 5
        return
    assert greyish <= frame_colours(), greyish
    assert "underline" in with_origins and "There is no such thing." in "\n".join(lines_of(svg))


def frame_colours() -> set[str]:
    """What an export draws around an empty screen."""
    from io import StringIO

    from rich.console import Console

    console = Console(record=True, file=StringIO(), width=10)
    console.print("x")
    return colours(console.export_svg(title=""))


@in_loop
async def test_a_conversation_of_ten_thousand_lines(tmp_path: Path) -> None:
    """It is there in a few seconds, and scrolls from its end to its first turn."""
    block = "## Part {n}\n\nSome **bold** text with `code`.\n\n```python\nfor i in range({n}):\n    print(i)\n```\n\n"
    answer = "".join(block.format(n=n) + f"- item {n}\n- another\n\n" for n in range(18))
    store = Store.open(tmp_path / "c.db")
    conversation, turn = store.new("tree"), None
    for n in range(50):
        turn = store.add(conversation, turn, "user", f"question number {n}")
        turn = store.finish(store.add(conversation, turn, "assistant", ""), f"answer number {n}\n\n{answer}")
    assert sum(len(each.text.splitlines()) for each in store.path(turn)) > 10_000
    app = chat_app(store=store, resume=conversation.id)
    began_s = perf_counter()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(lambda: app.activity.job is None and app.client.model_info is not None, seconds=60)
        took_s = perf_counter() - began_s
        print(f"shown after {took_s:.1f} s")
        log = app.query_one(Transcript)
        await until(lambda: log.max_scroll_y > 200, seconds=60)
        assert "another" in await seen(app, pilot)
        log.scroll_home(animate=False)
        await pilot.pause()
        assert "question number 0" in await seen(app, pilot)
        await app.run_command("find answer number 49")
        assert "answer number 49" in await seen(app, pilot)


@pytest.mark.parametrize("with_origins", [False, True])
@in_loop
async def test_strange_text_is_shown_as_it_is(with_origins: bool, script: Script) -> None:
    script.generations = [words("`[red]x[/red]` ", *(f"\n\n{text}" for text in STRANGE))]
    async with opened((80, 100)) as (app, pilot):
        if with_origins:
            app.action_token_colors()
        await app.ask("\n".join(STRANGE[:4]))
        await until(lambda: app.activity.job is None)
        await app.add_notice(STRANGE[0])
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
async def test_the_store_gives_back_what_was_strange(script: Script, tmp_path: Path) -> None:
    script.generations = [words("".join(STRANGE[:2]))]
    store = Store.open(tmp_path / "c.db")
    async with opened(app=chat_app(store=store)) as (app, pilot):
        await app.ask(STRANGE[0])
        await until(lambda: app.activity.job is None)
        assert [turn.text for turn in store.path(app.recorder.turns[-1])] == [STRANGE[0], "".join(STRANGE[:2])]
        assert "bell ␇ escape ␛[31mred␛[0m null ␀" in await seen(app, pilot)


@pytest.mark.parametrize(
    ("request_", "said", "hint"),
    [
        (LoadConfig(model="nothing", backend="toy"), "there is no toy model 'nothing'", "Use linear"),
        (LoadConfig(model="no-such-alias"), "no-such-alias", "edgespec list"),
        (LoadConfig(model="./missing.gguf"), "missing.gguf", "."),
    ],
    ids=["toy", "alias", "file"],
)
@in_loop
async def test_a_model_that_cannot_be_opened(request_: LoadConfig, said: str, hint: str) -> None:
    """One sentence and the next step, then another model opens."""
    async with opened(app=chat_app(request_)) as (app, pilot):
        (notice,) = app.query_one(Transcript).items
        message = notice.text
        assert isinstance(notice, Notice) and notice.kind == "error"
        assert said.casefold() in message.casefold() and hint in message, message
        assert message[0].isupper() or not message[0].isalpha()
        await app.ask("hello")
        await pilot.pause()
        assert "No model is open; Ctrl+G" in toasts(app)[-1] and not app.recorder.turns
        app.open(TOY)
        await until(lambda: app.activity.job is None and app.client.model_info is not None)
        await until(lambda: "Tree on toy" in toasts(app)[-1])


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
    def work(check: object) -> object:
        raise ZeroDivisionError("an accident")
        yield

    return client.submit(work)  # type: ignore[arg-type]


@in_loop
async def test_an_exception_ends_the_app_and_what_is_under_way(script: Script) -> None:
    """It is raised to whoever runs the app, with a return code, while an answer without an end is generated."""
    script.generations, script.holds = [words("one ", "two ", "three")[:-1]], True
    app, began_s = chat_app(), perf_counter()
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
