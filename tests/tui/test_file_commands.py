"""Commands that write a conversation to a file, and read one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tui.driving import Driver
from tests.tui.scenes import Scenes, again, varied

SCENES = Scenes()


@pytest.mark.parametrize("name", ["export", "import", "save", "load"])
def test_command(name: str, tmp_path: Path) -> None:
    SCENES.play(name, tmp_path)


@SCENES.add("export")
async def export(chat: Driver, folder: Path) -> None:
    await chat.errs(f"/export {folder}/a.md", "no conversation to export")
    answer = await chat.ask("hello")
    await again(chat, "/retry")
    await chat.hears(f"/export {folder}/a.md", "wrote", "a.md")
    assert f"## User\n\nhello\n\n## Assistant\n\n{answer.rstrip()}\n" in (folder / "a.md").read_text()
    await chat.hears(f"/export {folder}/a.JSON", "wrote")
    assert len(json.loads((folder / "a.JSON").read_text())["turns"]) == 3
    await chat.errs(f"/export {folder}/a.txt", "'a.txt' has no known format", ".md or .json")
    await chat.errs(f"/export {folder}/none/a.md", "cannot write")
    (folder / "a.md").write_text("mine")
    await chat.errs(f"/export {folder}/a.md", "a.md exists", "Add ! to the command")
    assert (folder / "a.md").read_text() == "mine"
    await chat.hears(f"/export! {folder}/a.md", "wrote", "a.md")
    assert "hello" in (folder / "a.md").read_text()
    await chat.errs("/export!", "/export! needs FILE")
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["a.JSON", "a.md"]


@SCENES.add("import")
async def take_in(chat: Driver, folder: Path) -> None:
    await varied(chat)
    await chat.ask("hello")
    await again(chat, "/retry")
    texts, title = chat.texts, chat.app.recorder.store.recent()[0].title
    await chat.hears(f"/export {folder}/a.json", "wrote")
    await chat.hears("/new", "new")
    for name, content in (("b.json", "{}"), ("c.json", "no json"), ("d.json", '{"edgespec_conversation": 9}')):
        (folder / name).write_text(content)
        await chat.errs(f"/import {folder}/{name}", "not an exported conversation")
    await chat.errs(f"/import {folder}/none.json", "cannot read")
    await chat.send(f"/import {folder}/a.json")
    await chat.until(lambda: chat.texts == texts)
    assert chat.shown == texts and [each.title for each in chat.app.recorder.store.recent()] == [title, title]
    await chat.hears("/branch", "branch 1 of 2")


@SCENES.add("save")
async def save(chat: Driver, folder: Path) -> None:
    answer = await chat.ask("hello")
    await chat.hears(f"/save {folder}/a.json", "saved 2 messages")
    assert [m["content"] for m in json.loads((folder / "a.json").read_text())["messages"]] == ["hello", answer]
    await chat.ask("and on")
    await chat.errs(f"/save {folder}/a.json", "a.json exists", "/save! FILE")
    assert len(json.loads((folder / "a.json").read_text())["messages"]) == 2
    await chat.hears(f"/save! {folder}/a.json", "saved 4 messages")
    for wrong in (f"{folder}/none/a.json", "/", ".", str(folder)):
        await chat.errs(f"/save {wrong}", "cannot write")


@SCENES.add("load")
async def load(chat: Driver, folder: Path) -> None:
    await chat.hears("/system Be brief.", "brief")
    answer = await chat.ask("hello")
    await chat.hears(f"/save {folder}/a.json", "saved 2")
    await chat.hears("/new", "new")
    await chat.hears("/system none", "none")
    (folder / "bad.json").write_text("{}")
    await chat.errs(f"/load {folder}/bad.json", "not a saved chat")
    await chat.errs(f"/load {folder}/none.json", "cannot read")
    assert chat.app.chat.system is None
    await chat.hears(f"/load {folder}/a.json", "loaded 2 messages")
    assert chat.texts == chat.shown == ["hello", answer] and chat.app.chat.system == "Be brief."
    assert chat.footers == [""] and chat.turns[-1].metrics == {"reason": "stop"}  # it has ended normally
    kept = chat.app.recorder.store.recent()
    assert len(kept) == 2 and kept[0].system == "Be brief."
    assert (await chat.ask("and on")) and len(
        chat.app.recorder.store.path(chat.app.recorder.store.recent()[0].leaf)
    ) == 4
