"""The screen before the first message, the line of what is waited for, and what F2 shows during an answer."""

from __future__ import annotations

from dataclasses import replace

from textual.widgets import DataTable, OptionList

from edgespec.backends.options import LoadOptions
from edgespec.chat import Store
from edgespec.chat.tui.details import Details
from edgespec.chat.tui.opening import Opening
from edgespec.chat.tui.progress import Activity, describe_wait
from edgespec.chat.tui.transcript import Answer
from edgespec.core.protocols import PrefillProgress
from edgespec.text.stream import Piece
from tests.chat.tui.driving import EMBEDDED, chat_of, driving, in_loop
from tests.chat.tui.screens import seen


@in_loop
async def test_examples_and_the_last_conversations() -> None:
    async with driving() as chat:
        listing = chat.app.query_one("#opening-list", OptionList)
        assert "Continues the text that you begin" in await seen(chat.app, chat.pilot) and listing.option_count == 4
        chat.prompt.focus()
        await chat.press("shift+tab")
        assert listing.has_focus and listing.highlighted == 1  # below a title
        chat.app.refresh_instruments()
        assert listing.highlighted == 1
        await chat.press("enter")
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.idle()
        assert chat.texts[0].startswith("The three most") and not chat.app.query_one(Opening).display
        await chat.send("/new")
        await chat.until(lambda: listing.option_count == 6 and chat.app.query_one(Opening).display)
        listing.focus()
        await chat.press("end", "enter")
        await chat.until(lambda: len(chat.turns) == 2)
        assert chat.prompt.has_focus and "not saved" not in await seen(chat.app, chat.pilot)
        await chat.begin("more")
        await chat.press("f2")
        await chat.until(lambda: isinstance(chat.app.screen, Details) and chat.app.screen.query(DataTable))
        table = chat.app.screen.query_one(DataTable)
        await chat.until(lambda: table.row_count)
        newest = int(table.get_row_at(0)[0])
        await chat.until(lambda: table.row_count and int(table.get_row_at(0)[0]) > newest)
    async with driving(store=Store.in_memory()) as chat:
        assert "not saved" in await seen(chat.app, chat.pilot)


@in_loop
async def test_what_is_said_of_the_embedded_pair_during_a_load_and_after_an_answer() -> None:
    request = replace(EMBEDDED, load=LoadOptions(context_size=4096, threads=1))
    async with driving(request, chat=chat_of(8)) as chat:
        said, ready = chat.notices()
        assert said.startswith("The model was trained for 2,048 tokens")
        assert ready == "Ready: python-6m on llama.cpp, drafts by lookups + python-6m/draft."
        await chat.press("f2")
        await chat.until(lambda: chat.app.screen.query("#costs"))
        await chat.until(lambda: "The model was trained for" in str(chat.app.screen.query_one("#costs").render()))
        await chat.press("escape")
        advice = "python-6m completes Python code; Ctrl+G lists models that one can talk to."
        await chat.ask("hello")
        assert chat.notices()[-1] == advice
        await chat.ask("def add(a, b):")
        assert chat.notices().count(advice) == 1


def test_what_an_answer_waits_for() -> None:
    answer = Answer()
    activity = Activity(answer=answer)
    assert describe_wait(activity, 2.4) == ("waiting for the first token · 2 s", None)
    activity.meter.add_progress(PrefillProgress(300, 1200), 10.0)
    assert describe_wait(activity, 2.4) == ("reading 300 of 1,200 tokens", 0.25)
    activity.meter.add_progress(PrefillProgress(600, 1200), 12.0)
    assert describe_wait(activity, 2.4) == ("reading 600 of 1,200 tokens, 150 tokens/s, 4 s left", 0.5)
    activity.meter.emitted_tokens = 1234
    answer.append([Piece("hm", "reasoning", "")])
    assert describe_wait(activity, 12) == ("reasoning · 1,234 tokens · 12 s", None)
    answer.append([Piece("so", "answer", "")])
    assert describe_wait(activity, 13) == (None, None)
    assert describe_wait(Activity(), 1) == (None, None)
