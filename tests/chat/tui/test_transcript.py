"""A long conversation: only what is in the window is drawn, and the window keeps its place in the text."""

from __future__ import annotations

from textual.pilot import Pilot

from edgespec.chat import Turn
from edgespec.chat.conversation import Role
from edgespec.chat.tui.app import ChatApp
from edgespec.chat.tui.blocks import Block
from edgespec.chat.tui.transcript import Answer, Notice, Transcript
from edgespec.text.stream import Piece
from tests.chat.tui.driving import in_loop, until
from tests.chat.tui.screens import opened
from tests.gguf_models import REPOSITORY

TEXT = (REPOSITORY / "docs" / "architecture.md").read_text()
N_ANSWERS = 30


def turn(role: Role, text: str) -> Turn:
    return Turn(1, 1, None, role, text, "", [], {}, {"reason": "error"}, True, 0.0)


def turns() -> list[Turn]:
    pairs = ([turn("user", f"user {n}"), turn("assistant", f"assistant {n}\n\n{TEXT}")] for n in range(N_ANSWERS))
    return [each for pair in pairs for each in pair]


def shown(log: Transcript) -> list[str]:
    return [log.render_line(y).text.rstrip() for y in range(log.size.height)]


@in_loop
async def test_the_window_keeps_its_place_in_a_long_conversation() -> None:
    async with opened((100, 30)) as (app, pilot):
        app.screen.remove_class("opening")
        log = app.query_one(Transcript)
        log.show(turns())
        await until(lambda: log.max_scroll_y > 5_000 and log._drawn)
        assert log.scroll_offset.y == log.max_scroll_y and len(log._drawn) < 50
        end = shown(log)
        assert any(end) and end[-1].strip() == "ended by an error; the text so far is kept"
        answer = log.answers[-1]
        answer.append([Piece(f" word{n}", "answer", "") for n in range(500)])
        log.update()
        await pilot.pause()
        assert log.scroll_offset.y == log.max_scroll_y and "word499" in "".join(shown(log))
        log.scroll_home(animate=False)
        await pilot.pause()
        assert shown(log)[1].strip() == "▌ 1 user 0"
        middle = next(each for each in log.items if each.text.startswith(f"assistant {N_ANSWERS // 2}\n"))
        log._reveal((middle, middle.blocks[0]))
        await pilot.pause()
        assert shown(log)[1].strip() == f"assistant {N_ANSWERS // 2}"
        await stays(app, pilot, log)


async def stays(app: ChatApp, pilot: Pilot[None], log: Transcript) -> None:
    """The window keeps its first line through steps back, growth, and changes of the width and the theme."""
    first = shown(log)[1]
    answer = log.answers[-1]
    answer.append([Piece("\n\nmore", "answer", "")])
    log.update()
    for width in (60, 140, 100):
        await pilot.resize_terminal(width, 30)
        await until(lambda: first in shown(log)[:3])
    app.theme = "textual-light"
    await pilot.pause()
    assert first in shown(log)[:3] and log.scroll_offset.y < log.max_scroll_y


@in_loop
async def test_a_selection_is_copied_as_it_was_written() -> None:
    """Lines that were broken to fit are whole again, and the margins of code are left out."""
    sentence = " ".join(f"word{n}" for n in range(40))
    async with opened((80, 40)) as (app, pilot):
        app.screen.remove_class("opening")
        log = app.query_one(Transcript)
        log.show([turn("assistant", f"{sentence}\n\n```py\nif x:\n    y\n```\n\n> quoted")])
        await until(lambda: "quoted" in "".join(shown(log)))
        lines = shown(log)
        last = next(y for y, line in enumerate(lines) if "quoted" in line)
        assert lines[1].strip() != sentence
        await pilot.mouse_down(log, offset=(1, 1))
        await pilot.hover(log, offset=(40, last))
        await pilot.mouse_up(log, offset=(40, last))
        await pilot.pause()
        assert app.screen.get_selected_text() == f"{sentence}\n\npy · 1\nif x:\n    y\n\nquoted"
        app.screen.clear_selection()
        await pilot.mouse_down(log, offset=(7, 1))
        await pilot.hover(log, offset=(11, 1))
        await pilot.mouse_up(log, offset=(11, 1))
        assert app.screen.get_selected_text() == sentence[6:11]


class Counted(Notice):
    """A notice that counts how often it was laid out."""

    count = 0

    @property
    def blocks(self) -> list[Block]:
        self.count += 1
        return super().blocks


@in_loop
async def test_a_frame_lays_out_the_answer_that_grows_and_what_follows_it() -> None:
    async with opened((100, 30)) as (app, pilot):
        app.screen.remove_class("opening")
        log = app.query_one(Transcript)
        before, answer, after = Counted("before"), Answer(), Counted("after")
        for item in (before, answer, after):
            log.add(item)
        await until(lambda: log.size.height > 0 and "after" in "".join(shown(log)))
        answer.append([Piece("one", "answer", "")])
        log.update(answer)
        for word in (" two", "\n\nthree"):
            answer.append([Piece(word, "answer", "")])
            counts = before.count, after.count
            log.update(answer)
            assert (before.count, after.count) == (counts[0], counts[1] + 1)
        await pilot.pause()
        assert [line.strip() for line in shown(log) if line] == ["before", "one two", "three", "after"]
        log.clear(keep=answer)
        log.update(answer)
        await pilot.pause()
        assert [line.strip() for line in shown(log) if line] == ["one two", "three"]
