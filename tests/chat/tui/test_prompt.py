"""The prompt: writing, pasting, its history, new lines, and completion of commands."""

from __future__ import annotations

from textual._xterm_parser import XTermParser
from textual.events import Key, Paste

from edgespec.chat.tui.keys import ALT_ENTER, Help
from edgespec.chat.tui.prompt import Popup
from edgespec.chat.tui.transcript import Transcript
from tests.chat.tui.driving import Driver, in_app


@in_app
async def test_writing_and_the_history_of_what_was_sent(chat: Driver) -> None:
    prompt = chat.prompt
    await chat.press("enter", "space", "enter")  # nothing to send
    assert not chat.turns and chat.app.activity.job is None
    prompt.put("")
    await chat.press("a", "ctrl+j", "b", "alt+enter", "c", "shift+enter", "shift+\r", "backspace", "backspace")
    assert prompt.text == "a\nb\nc"
    await chat.press("up")  # inside the text
    assert prompt.text == "a\nb\nc" and prompt.cursor_location[0] == 1
    await chat.press("enter")
    await chat.until(lambda: len(chat.turns) == 2)
    await chat.idle()
    assert chat.texts[0] == "a\nb\nc" and prompt.text == ""
    await chat.ask("second")
    await chat.press("d", "up")
    assert prompt.text == "second"
    await chat.press("up")
    assert prompt.text == "a\nb\nc"
    await chat.press("up", "up", "up")  # to its first line, and no further back than the first
    assert prompt.text == "a\nb\nc"
    await chat.press("down")
    assert prompt.text == "second"
    await chat.press("down")
    assert prompt.text == "d"  # what was being written
    await chat.press("down")
    assert prompt.text == "d"


@in_app
async def test_keys_take_effect_in_their_order_while_the_app_is_busy(chat: Driver) -> None:
    """Of keys that wait for a busy app, none overtakes another: neither in the prompt nor on the way to the app."""
    app, prompt = chat.app, chat.prompt
    app.chat.max_tokens = 5
    waiting = ["p", "a", "s", "X", "backspace", "s", "left", "left", "ctrl+j", "end", "!", "enter", "ctrl+n",
               "l", "o", "s", "t", "ctrl+u", "/", "s", "p", "e", "tab", "o", "enter"]  # fmt: skip
    for key in waiting:
        app.post_message(Key(key, key if len(key) == 1 else None))
    await chat.until(lambda: any("there is no" in each or "/spec takes" in each for each in chat.notices("error")))
    await chat.until(lambda: app.activity.job is None and not prompt.text)
    assert app.recorder.store.turns(app.recorder.store.recent()[0])[0].text == "pa\nss!"
    assert any("/spec takes on, off, auto" in each for each in chat.notices("error"))  # what Tab has completed


@in_app
async def test_one_key_clears_the_prompt_and_another_brings_it_back(chat: Driver) -> None:
    await chat.press("a", "ctrl+j", "b", "up", "ctrl+u")
    assert chat.prompt.text == ""
    await chat.press("ctrl+underscore")
    assert chat.prompt.text == "a\nb"


def test_terminals_that_send_escape_and_return_for_a_new_line() -> None:
    def keys_of(sequence: str) -> list[str]:
        parser = XTermParser()
        events = [*parser.feed(sequence), *parser.feed("")]
        return [event.key for event in events if isinstance(event, Key)]

    assert [keys_of(each) for each in (ALT_ENTER, "\x1b[13;2u", "\x1b[13;3u", "\x1b[27;2;13~")] == [
        ["ctrl+j"], ["shift+enter"], ["alt+enter"], ["shift+\r"]
    ]  # fmt: skip


@in_app
async def test_typing_and_pasting_reach_the_prompt_from_wherever_the_focus_is(chat: Driver) -> None:
    await chat.ask("hello")
    for widget in (chat.app.query_one(Transcript), None):
        chat.app.screen.set_focus(widget)
        await chat.press("a", "space")
        assert chat.prompt.has_focus
    chat.app.screen.set_focus(None)
    chat.app.post_message(Paste("b\n"))
    await chat.until(lambda: chat.prompt.text == "a a b\n" and chat.prompt.has_focus)
    chat.app.post_message(Paste("c"))
    await chat.until(lambda: chat.prompt.text.endswith("c"))
    await chat.pilot.pause()
    below = chat.app.screen
    await chat.press("f1")
    await chat.until(lambda: chat.app.screen is not below)
    await chat.press("x", "escape")
    assert chat.prompt.text == "a a b\nc"


@in_app
async def test_pages_scroll_the_conversation(chat: Driver) -> None:
    chat.app.chat.max_tokens = 400
    await chat.ask("\n".join("hello" * 30))
    log = chat.app.query_one(Transcript)
    await chat.until(lambda: log.max_scroll_y > log.size.height and log.scroll_offset.y == log.max_scroll_y)
    await chat.press("x", "pageup")
    await chat.until(lambda: log.scroll_offset.y < log.max_scroll_y)
    await chat.press("pagedown", "y")
    await chat.until(lambda: log.scroll_offset.y == log.max_scroll_y)
    assert chat.prompt.text == "xy"


@in_app
async def test_completion_of_commands(chat: Driver) -> None:
    popup, prompt = chat.app.query_one(Popup), chat.prompt
    await chat.press(*"/spe")
    await chat.until(lambda: popup.display)
    await chat.press("tab")
    await chat.until(lambda: popup.display and prompt.text == "/spec ")
    await chat.press(*"of", "tab")
    await chat.until(lambda: not popup.display and prompt.text == "/spec off")
    await chat.press("enter")
    await chat.until(lambda: "Speculation: off" in "".join(chat.notices()) and not prompt.text)
    await chat.press(*"/draft ngram+m", "tab")
    await chat.until(lambda: prompt.text == "/draft ngram+model")
    prompt.put("")
    await chat.press(*"/sp", "down", "enter")  # the selected one is sent
    await chat.until(lambda: sum("Speculation" in each for each in chat.notices()) == 2)
    await chat.press(*"/cont", "tab")
    await chat.until(lambda: prompt.text == "/continue" and not popup.display)
    await chat.press("enter")
    await chat.until(lambda: any("no answer to continue" in each for each in chat.notices()))
    await chat.press(*"/s", "escape")
    await chat.until(lambda: not popup.display and prompt.text == "/s")
    prompt.put("")
    await chat.errs("/brannch", "no command /brannch", "Did you mean /branch?")
    await chat.press(*"//")
    await chat.pilot.pause()
    assert not popup.display
    prompt.put("//sp is a path")
    await chat.press("enter")
    await chat.until(lambda: chat.texts and chat.texts[0] == "/sp is a path")
    await chat.idle()
    await chat.press("?", "enter")
    await chat.until(lambda: isinstance(chat.app.screen, Help))
