"""Commands on the conversation: its questions, answers and branches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from textual.widgets import DataTable

from edgespec.chat.tui.picker import History
from tests.chat.tui.driving import ENDLESS, Driver, again, in_app, numbers, varied

FENCED = "Look:\n\n```python\nprint(1)\n```\n\n~~~\n```\n~~~"


@in_app
async def test_retry(chat: Driver) -> None:
    await chat.errs("/retry", "no question yet")
    await varied(chat)
    first, second = await chat.ask("one"), await chat.ask("two")
    for wrong in ("0", "3", "x", "-1", "1 2", "1" * 5000):
        await chat.errs(f"/retry {wrong}", "questions 1 to 2")
    third = await again(chat, "/retry")
    assert chat.texts == ["one", first, "two", third] and third != second and chat.shown == chat.texts
    fourth = await again(chat, "/retry 1")
    assert chat.texts == ["one", fourth] and fourth != first and chat.shown == chat.texts
    assert [message.content for message in chat.app.chat.messages] == chat.texts
    await chat.begin("more", 1)
    await chat.waits_amid("/retry")


@in_app
async def test_continue(chat: Driver) -> None:
    await chat.errs("/continue", "no answer to continue")
    chat.app.chat.max_tokens = 60
    whole = await chat.ask("one")
    chat.app.chat.max_tokens = 20
    assert whole.startswith(await again(chat, "/retry")) and len(chat.texts[-1]) == 20
    id, chat.app.chat.max_tokens = chat.turns[-1].id, 40
    await chat.send("/continue")
    await chat.until(lambda: len(chat.texts[-1]) == 60 and chat.turns[-1].finished)
    await chat.idle()
    assert chat.texts == chat.shown == ["one", whole] and chat.turns[-1].id == id
    assert chat.turns[-1].metrics["emitted_tokens"] == 60 and "60 tokens, " in chat.footers[-1]
    assert sum(span[0] for span in chat.turns[-1].spans) == 60
    await chat.press("ctrl+l")
    chat.app.chat.max_tokens = ENDLESS
    await chat.send("/continue")
    await chat.growing(70)
    await chat.waits_amid("/continue")
    assert chat.texts[-1].startswith(whole) and chat.app.chat.messages[-1].content == chat.texts[-1] == chat.shown[-1]
    chat.app.chat.sampling = replace(chat.app.chat.sampling, logit_bias=((256, 1000.0),))
    await chat.send("/continue")
    await chat.until(lambda: chat.turns[-1].metrics.get("reason") == "stop")
    await chat.errs("/continue", "has ended this answer itself", "/retry")


@in_app
async def test_undo_and_edit(chat: Driver) -> None:
    await chat.errs("/undo", "no question yet")
    await chat.ask("one")
    await chat.ask("two")
    assert f"/{2 * ENDLESS:,}" in numbers(chat)
    for left in (2, 0):
        await chat.send("/undo")
        await chat.until(lambda left=left: len(chat.turns) == left)
        assert chat.shown == chat.texts and len(chat.app.chat.messages) == left
        assert chat.prompt.text == "" and not numbers(chat)
    await chat.errs("/undo", "no question yet")
    await chat.errs("/edit", "no question yet")
    first = await chat.ask("one")
    await chat.ask("two")
    await chat.errs("/edit 3", "questions 1 to 2")
    await chat.send("/edit")
    await chat.until(lambda: chat.prompt.text == "two")
    assert chat.texts == chat.shown == ["one", first]
    await chat.press("x", "enter")
    await chat.until(lambda: len(chat.turns) == 4 and chat.app.activity.job is None)
    assert chat.texts[2] == "twox" and chat.shown == chat.texts
    await chat.send("/edit 1")
    await chat.until(lambda: chat.prompt.text == "one")
    assert chat.texts == chat.shown == [] and not chat.app.chat.messages
    await chat.press("x", "enter")
    await chat.until(lambda: len(chat.turns) == 2 and chat.app.activity.job is None)
    assert chat.texts[0] == "onex" and str(chat.app.query_one("#pane").border_title) == "one"


@in_app
async def test_branch(chat: Driver) -> None:
    await chat.errs("/branch", "no branches")
    await varied(chat)
    first = await chat.ask("one")
    await chat.errs("/branch", "no branches", "/retry and /edit")
    after = await chat.ask("two")
    second = await again(chat, "/retry 1")
    await chat.hears("/branch 2", "branch 2 of 2")
    third = await again(chat, "/retry 1")
    for wrong in ("0", "4", "x"):
        await chat.errs(f"/branch {wrong}", "branches 1 to 3")
    await chat.hears("/branch", "branch 1 of 3")
    assert chat.texts == chat.shown == ["one", first, "two", after]
    await chat.hears("/branch 3", "branch 3 of 3")
    assert chat.texts == chat.shown == ["one", third]
    await chat.hears("/branch 2", "branch 2 of 3")
    assert chat.texts == chat.shown == ["one", second]
    assert [message.content for message in chat.app.chat.messages] == ["one", second]
    await chat.hears("/branch back", "branch 1 of 3 at the answer to question 1")
    await chat.send("/edit 1")
    await chat.until(lambda: chat.prompt.text == "one")
    await chat.hears("/branch", "branch 1 of 1 at question 1")  # what was left is found again
    assert chat.texts == chat.shown == ["one", third]
    await chat.hears("/branch down", "branch 3 of 3 at the answer to question 1")
    await chat.hears("/branch", "branch 1 of 3 at the answer to question 1")
    assert chat.texts == chat.shown == ["one", first, "two", after]
    chat.prompt.put("")
    again_after = await again(chat, "/retry 2")
    await chat.send("/edit 1")
    await chat.until(lambda: chat.prompt.text == "one")
    chat.prompt.put("")
    edited = await chat.ask("edited")
    await chat.hears("/branch 1", "branch 1 of 2 at question 1")
    assert chat.texts == chat.shown == ["one", first, "two", again_after]
    await chat.hears("/branch up", "branch 1 of 2 at question 1")
    await chat.hears("/branch down", "branch 1 of 3 at the answer to question 1")
    await chat.hears("/branch down", "branch 2 of 2 at the answer to question 2")
    await chat.hears("/branch 1", "branch 1 of 2 at the answer to question 2")
    assert chat.texts == chat.shown == ["one", first, "two", after]
    await chat.hears("/branch up", "branch 1 of 3 at the answer to question 1")
    await chat.hears("/branch back", "branch 3 of 3 at the answer to question 1")
    assert chat.texts == chat.shown == ["one", third]
    await chat.hears("/branch up", "branch 1 of 2 at question 1")
    await chat.hears("/branch", "branch 2 of 2 at question 1")
    assert chat.texts == chat.shown == ["edited", edited]


@in_app
async def test_attach(chat: Driver, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    return 'é'\n\n")
    (tmp_path / "b.md").write_text("  ````py\nx\n  ````\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.txt").write_bytes(b"x" * (2**20 + 1))
    (tmp_path / "e.txt").write_bytes(b"x" * 2**20)
    await chat.send(f"/attach {tmp_path}/a.py")
    await chat.until(lambda: chat.prompt.text)
    assert chat.prompt.text == "a.py:\n```py\ndef f():\n    return 'é'\n```\n"
    chat.prompt.put("")
    await chat.send(f"/attach {tmp_path}/b.md")
    await chat.until(lambda: chat.prompt.text)
    assert chat.prompt.text == "b.md:\n`````md\n  ````py\nx\n  ````\n`````\n"
    chat.prompt.put("")
    for wrong, said in (("c.bin", "not a text file"), ("none.txt", "cannot read"), ("", "cannot read"),
                        ("d.txt", "larger than 1 MiB")):  # fmt: skip
        await chat.errs(f"/attach {tmp_path}/{wrong}", said)
        assert chat.prompt.text == ""
    await chat.errs("/attach ~nobody-of-that-name/x", "home directory")
    await chat.send(f"/attach {tmp_path}/e.txt")
    await chat.until(lambda: len(chat.prompt.text) > 2**20)


@in_app
async def test_rename(chat: Driver) -> None:
    await chat.errs("/rename Tales", "no conversation to rename")
    await chat.ask("The first question")
    await chat.hears("/rename  Tales  of old", "renamed to Tales of old")
    assert chat.app.recorder.store.recent()[0].title == "Tales of old"
    assert str(chat.app.query_one("#pane").border_title) == "Tales of old"


@in_app
async def test_copy(chat: Driver, tmp_path: Path) -> None:
    await chat.errs("/copy", "no answer to copy")
    state = chat.app.chat
    await chat.ask("hello")
    await chat.hears(f"/export {tmp_path}/a.json", "wrote")
    written = json.loads((tmp_path / "a.json").read_text())
    written["turns"][1]["text"] = FENCED
    (tmp_path / "a.json").write_text(json.dumps(written))
    await chat.send(f"/import {tmp_path}/a.json")
    await chat.until(lambda: state.messages[1].content == FENCED)
    for line, copied in (("/copy", FENCED), ("/copy 1", "print(1)\n"), ("/copy 2", "```\n")):
        await chat.hears(line, f"copied {len(copied)} characters")
        assert chat.app.clipboard == copied
    for wrong in ("0", "3", "x"):
        await chat.errs(f"/copy {wrong}", f"'{wrong}' is not the number of a code block: there are code blocks 1 to 2.")


@in_app
async def test_new(chat: Driver) -> None:
    for _ in range(2):
        await chat.ask("hello")
        await chat.hears("/new", "new conversation")
        assert chat.texts == chat.shown == [] and not chat.app.chat.messages and not numbers(chat)
    assert len(chat.app.recorder.store.recent()) == 2
    await chat.begin("more", 1)
    await chat.waits_amid("/new")


@in_app
async def test_incognito(chat: Driver, tmp_path: Path) -> None:
    """It can do what others can; only what is exported is kept. tests/chat/tui/test_memory.py looks at the files."""
    await chat.hears("/incognito", "nothing of it is kept")
    await chat.ask("a dragon")
    await again(chat, "/retry")
    await chat.hears("/branch", "branch 1 of 2")
    await chat.hears("/rename Tales", "Tales")
    await chat.hears(f"/export {tmp_path / 'tales.json'}", "wrote")
    await chat.send(f"/import {tmp_path / 'tales.json'}")
    await chat.until(lambda: chat.app.recorder.conversation and chat.app.recorder.conversation.id == 2)
    assert chat.texts[0] == "a dragon" and chat.app.is_incognito and not chat.app.recorder.saved.recent()
    await chat.hears("/incognito", "no longer incognito")
    await chat.ask("a knight")
    assert [each.title for each in chat.app.recorder.saved.recent()] == ["a knight"]
    await chat.begin("more", 1)
    await chat.waits_amid("/incognito")


@in_app
async def test_history(chat: Driver) -> None:
    answer = await chat.ask("a dragon")
    await chat.hears("/new", "new")
    await chat.ask("a knight")
    for line, found in (("/history DRAG", 1), ("/history knig", 1), ("/history", 2), ("/history nowhere", 0)):
        await chat.send(line)
        await chat.until(lambda: isinstance(chat.app.screen, History) and chat.app.screen.query(DataTable))
        assert chat.app.screen.query_one(DataTable).row_count == found, line
        await chat.press("escape")
        await chat.until(lambda: len(chat.app.screen_stack) == 1)
    assert chat.texts[0] == "a knight"
    await chat.send("/history drag")
    await chat.until(lambda: isinstance(chat.app.screen, History))
    await chat.press("enter")
    await chat.until(lambda: chat.texts == ["a dragon", answer])
    assert chat.shown == chat.texts and not numbers(chat)
