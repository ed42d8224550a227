"""Commands that write a conversation to a file, and read one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chat.tui.driving import Driver, again, in_app, varied


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
    (tmp_path / "folder.md").mkdir()
    for wrong in ("none/a.md", "folder.md"):
        await chat.errs(f"/export {tmp_path}/{wrong}", "cannot write")
    (tmp_path / "a.md").write_text("mine")
    await chat.errs(f"/export {tmp_path}/a.md", "a.md' exists", "Add ! to the command")
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
