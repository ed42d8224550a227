"""Every key of the chat, pressed."""

from __future__ import annotations

import asyncio

from textual.binding import Binding
from textual.widgets import Input

from edgespec.chat import Store
from edgespec.chat.tui.details import Details
from edgespec.chat.tui.keys import BINDINGS, KEYS, Help
from edgespec.chat.tui.picker import History, Picker
from edgespec.chat.tui.prompt import Prompt
from edgespec.chat.tui.race import Race
from edgespec.text.stream import Piece
from tests.chat.tui.driving import Driver, driving, in_app
from tests.chat.tui.screens import seen


def test_the_help_names_every_key() -> None:
    bindings = [*BINDINGS, *Prompt.BINDINGS]
    keys = [key for each in bindings if isinstance(each, Binding) for key in each.key.split(",")]
    assert len(keys) >= len(bindings)
    listed = ", ".join(names for names, _ in KEYS).casefold().replace("esc", "escape").split(", ")
    assert not {*keys, "ctrl+p", "enter", "up", "down", "tab", "ctrl+d"} - set(listed)


@in_app
async def test_ctrl_d_deletes_in_a_text_and_leaves_without_one(chat: Driver) -> None:
    await chat.press("a", "b", "home", "ctrl+d")
    assert chat.prompt.text == "b" and chat.app.is_running
    await chat.press("ctrl+d")
    assert chat.prompt.text == "" and chat.app.is_running
    await chat.press("ctrl+d")
    await chat.until(lambda: not chat.app.is_running)


@in_app
async def test_stopping_keeps_the_text(chat: Driver) -> None:
    answer = await chat.begin("hello")
    text = answer.text
    await chat.press("escape")
    await chat.idle()
    assert chat.texts == ["hello", answer.text] and answer.text.startswith(text)
    assert chat.turns[-1].finished and chat.turns[-1].metrics["reason"] == "cancelled"
    assert "; stopped" in chat.footers[-1]
    chat.app.chat.max_tokens = 5
    await chat.ask("and on")
    await chat.press("ctrl+c")  # nothing to stop
    await chat.pilot.pause()
    assert len(chat.turns) == 4 and chat.app.is_running


@in_app
async def test_ctrl_c_copies_a_selection(chat: Driver) -> None:
    await chat.ask("hello")
    chat.app.screen.text_select_all()
    await chat.press("ctrl+c")
    await chat.until(lambda: chat.app.clipboard)
    assert "hello" in chat.app.clipboard


@in_app
async def test_screens_open_and_close(chat: Driver) -> None:
    screens = {"f1": (Help, "f1"), "f2": (Details, "q"), "ctrl+g": (Picker, "escape"), "ctrl+r": (History, "escape")}
    for key, (screen, close) in screens.items():
        await chat.press(key)
        await chat.until(lambda screen=screen: isinstance(chat.app.screen, screen))
        await chat.press(close)
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
    assert chat.prompt.has_focus


@in_app
async def test_an_answer_goes_on_behind_a_screen_and_the_history_has_to_wait(chat: Driver) -> None:
    answer = await chat.begin("hello")
    await chat.press("ctrl+r")
    await chat.until(lambda: chat.app.queued == ["/history"])
    assert len(chat.app.screen_stack) == 1
    await chat.press("up")
    chat.prompt.put("")
    for key in ("f1", "f2"):
        await chat.press(key)
        await chat.until(lambda: len(chat.app.screen_stack) == 2)
        length = len(answer.text)
        await chat.until(lambda length=length: len(answer.text) > length)
        await chat.press("escape")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
    assert chat.app.activity.job is not None  # that Esc was the screen's


@in_app
async def test_reasoning_and_origins_fold_and_unfold_also_for_later_answers(chat: Driver) -> None:
    async def look() -> tuple[int, int, int]:
        shown = await seen(chat.app, chat.pilot)
        return shown.count("▶ Reasoning"), shown.count("because"), shown.count("plain: the model")

    await chat.ask("hello")
    (first,) = chat.transcript.answers
    first.append([Piece("because", "reasoning", "")])
    chat.transcript.update()
    assert await look() == (1, 0, 0)
    await chat.press("ctrl+t", "ctrl+o")
    assert await look() == (0, 1, 1)
    await chat.ask("again")
    assert await look() == (0, 1, 2)
    await chat.press("ctrl+t", "ctrl+o")
    assert await look() == (1, 0, 0)
    await chat.pilot.click(chat.transcript, offset=(3, 3))
    assert await look() == (0, 1, 0)


@in_app
async def test_clearing_the_screen_during_an_answer_keeps_the_answer(chat: Driver) -> None:
    answer = await chat.begin("hello")
    await chat.press("ctrl+l")
    await chat.until(lambda: len(chat.shown) == 1)
    assert chat.transcript.items == [answer]
    await chat.growing(len(answer.text) + 1)
    await chat.press("escape")
    await chat.idle()
    assert chat.texts == ["hello", answer.text] and chat.shown == [answer.text]
    await chat.press("ctrl+l")
    await chat.until(lambda: not chat.shown)
    await chat.hears("/copy", "copied")
    await chat.send("/retry")
    await chat.until(lambda: len(chat.shown) == 1 and chat.app.activity.answer is not None)
    await chat.press("ctrl+l", "escape")
    await chat.idle()
    await chat.send("/undo")
    await chat.until(lambda: not chat.shown)


def test_quitting_keeps_all_of_an_answer_under_way() -> None:
    async def quit_during_an_answer() -> str:
        async with driving() as chat:
            answer = await chat.begin("hello")
            await chat.press("ctrl+q")
            await chat.until(lambda: not chat.app.is_running)
        return answer.text

    text = asyncio.run(quit_during_an_answer())
    store = Store.open()
    _, answered = store.path(store.recent(1)[0].leaf)
    assert answered.text == text and answered.finished and answered.metrics["reason"] == "cancelled"


@in_app
async def test_quitting_during_a_race_and_behind_a_screen(chat: Driver) -> None:
    await chat.ask("hello")
    chat.app.chat.max_tokens = 50_000
    await chat.send("/race")
    await chat.until(lambda: isinstance(chat.app.screen, Race))
    await chat.until(lambda: chat.app.screen.query(".lane-header").last().render().plain.count("tok/s"))
    await chat.press("ctrl+q")
    await chat.until(lambda: not chat.app.is_running)


@in_app
async def test_the_palette_runs_a_command(chat: Driver) -> None:
    await chat.press("ctrl+p")
    await chat.until(lambda: len(chat.app.screen_stack) == 2 and chat.app.screen.query(Input))
    await chat.press(*"/spec")
    await chat.until(
        lambda: "/spec" in "".join(str(o.prompt) for o in chat.app.screen.query_one("CommandList").options)
    )
    await chat.press("enter")
    await chat.until(lambda: chat.notices()[1:] == ["Speculation: 3 tokens at a time, by ngram+model"])
    assert len(chat.app.screen_stack) == 1
