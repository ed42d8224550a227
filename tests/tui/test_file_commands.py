"""Commands that write a conversation to a file, and read one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tui.driving import Driver, again, in_app, varied


@in_app
async def test_export_and_import(chat: Driver, tmp_path: Path) -> None:
    await chat.errs(f"/export {tmp_path}/a.md", "no conversation to export")
    await varied(chat)
    await chat.ask("hello")
    answer = await again(chat, "/retry")
    await chat.hears(f"/export {tmp_path}/a.md", "wrote", "a.md")
    assert f"## User\n\nhello\n\n## Assistant\n\n{answer.rstrip()}\n" in (tmp_path / "a.md").read_text()
    await chat.hears(f"/export {tmp_path}/a.JSON", "wrote")
    assert len(json.loads((tmp_path / "a.JSON").read_text())["turns"]) == 3
    await chat.errs(f"/export {tmp_path}/a.txt", "'a.txt' has no known format", ".md or .json")
    await chat.errs(f"/export {tmp_path}/none/a.md", "cannot write")
    (tmp_path / "a.md").write_text("mine")
    await chat.errs(f"/export {tmp_path}/a.md", "a.md exists", "Add ! to the command")
    assert (tmp_path / "a.md").read_text() == "mine"
    await chat.hears(f"/export! {tmp_path}/a.md", "wrote", "a.md")
    assert "hello" in (tmp_path / "a.md").read_text()
    await chat.errs("/export!", "/export! needs FILE")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a.JSON", "a.md"]
    texts, title = chat.texts, chat.app.recorder.store.recent()[0].title
    await chat.hears("/new", "new")
    for name, content in (("b.json", "{}"), ("c.json", "no json"), ("d.json", '{"edgespec_conversation": 9}')):
        (tmp_path / name).write_text(content)
        await chat.errs(f"/import {tmp_path}/{name}", "not an exported conversation")
    await chat.errs(f"/import {tmp_path}/none.json", "cannot read")
    await chat.send(f"/import {tmp_path}/a.JSON")
    await chat.until(lambda: chat.texts == texts)
    assert chat.shown == texts and [each.title for each in chat.app.recorder.store.recent()] == [title, title]
    await chat.hears("/branch", "branch 1 of 2")


@in_app
async def test_save_and_load(chat: Driver, tmp_path: Path) -> None:
    answer = await chat.ask("hello")
    await chat.hears(f"/save {tmp_path}/a.json", "saved 2 messages")
    assert [m["content"] for m in json.loads((tmp_path / "a.json").read_text())["messages"]] == ["hello", answer]
    await chat.ask("and on")
    await chat.errs(f"/save {tmp_path}/a.json", "a.json exists", "/save! FILE")
    assert len(json.loads((tmp_path / "a.json").read_text())["messages"]) == 2
    await chat.hears(f"/save! {tmp_path}/a.json", "saved 4 messages")
    for wrong in (f"{tmp_path}/none/a.json", "/", ".", str(tmp_path)):
        await chat.errs(f"/save {wrong}", "cannot write")
    await chat.hears("/new", "new")
    await chat.hears("/system Be brief.", "brief")
    answer = await chat.ask("hello")
    await chat.hears(f"/save! {tmp_path}/a.json", "saved 2")
    await chat.hears("/new", "new")
    await chat.hears("/system none", "none")
    (tmp_path / "bad.json").write_text("{}")
    await chat.errs(f"/load {tmp_path}/bad.json", "not a saved chat")
    await chat.errs(f"/load {tmp_path}/none.json", "cannot read")
    assert chat.app.chat.system is None
    await chat.hears(f"/load {tmp_path}/a.json", "loaded 2 messages")
    assert chat.texts == chat.shown == ["hello", answer] and chat.app.chat.system == "Be brief."
    assert chat.footers == [""] and chat.turns[-1].metrics == {"reason": "stop"}  # it has ended normally
    kept = chat.app.recorder.store.recent()
    assert len(kept) == 3 and kept[0].system == "Be brief."
    await chat.ask("and on")
    assert len(chat.app.recorder.store.path(chat.app.recorder.store.recent()[0].leaf)) == 4
