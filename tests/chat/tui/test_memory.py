"""What the chat leaves in files: conversations with a memory, incognito ones, and deleted ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from edgespec.chat.tui.picker import History
from edgespec.folders import memory_folder
from edgespec.models.load_config import LoadConfig, MemoryOptions
from tests.chat.tui.driving import TOY, Driver, driving, in_loop
from tests.memory.texts import find_bytes

QUESTION = "xqzv of the sea"
SECRET = "kwjx of the land"


def remembering() -> LoadConfig:
    """The toy, which drafts from the memory in the data folder alone."""
    return replace(TOY, draft="suffix", draft_max=8, memory=MemoryOptions(memory_folder()))


def find_text(folder: Path, text: str) -> set[str]:
    """The files that have `text`, in any case."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.name for file in files if text.encode() in file.read_bytes().lower()}


def test_incognito_leaves_nothing_and_a_deleted_conversation_goes_from_all_files(data: Path) -> None:
    async def main() -> None:
        async with driving(remembering()) as chat:
            asked, secret = [*QUESTION.encode()], [*SECRET.encode()]  # the tokens of the toy
            await chat.ask(QUESTION)
            await chat.hears("/new", "new")
            await chat.ask(QUESTION)
            assert "tokens of earlier texts" in str(chat.app.query_one("#panel").query(".section")[1].render())
            await chat.hears("/incognito", "nothing of it is kept")
            assert "incognito" in str(chat.app.query_one("#pane").border_subtitle)
            await chat.ask(SECRET)
            assert chat.app.activity.meter.acceptance_rate is None, "nothing is drafted from the memory"
            await chat.hears("/new", "new")
            await chat.ask(SECRET)
            assert chat.app.is_incognito and len(chat.app.recorder.saved.recent()) == 2
            await chat.app.resume(1)
            assert not chat.app.is_incognito and chat.texts[0] == QUESTION
            await chat.hears("/new", "new")
            await delete_all(chat)
        assert not find_bytes(data, asked) and find_text(data, QUESTION) == {"prompts.jsonl"}
        assert not find_bytes(data, secret) and not find_text(data, SECRET)

    async def delete_all(chat: Driver) -> None:
        await chat.press("ctrl+r")
        await chat.until(lambda: isinstance(chat.app.screen, History))
        while saved := len(chat.app.recorder.saved.recent()):
            await chat.press("ctrl+x", "ctrl+x")
            assert len(chat.app.recorder.saved.recent()) == saved - 1
        await chat.press("escape")

    asyncio.run(main())


@in_loop
async def test_a_conversation_is_remembered_until_it_is_deleted(data: Path) -> None:
    async with driving(remembering()) as chat:
        asked = [*QUESTION.encode()]
        assert any("Texts are kept in " in text for text in chat.notices("note"))
        await chat.ask(QUESTION)
    assert find_bytes(data, asked) == {"memory.db"} and "conversations.db" in find_text(data, QUESTION)
    async with driving(remembering()) as chat:
        assert not any("Texts are kept in " in text for text in chat.notices("note")), "this is said once"
        recorder = chat.app.recorder
        await chat.ask(QUESTION)
        assert chat.app.activity.meter.acceptance_rate == 1.0
        await chat.hears("/new", "new")
        for each in recorder.saved.recent():
            recorder.saved.remove(each)
    assert not find_bytes(data, asked)
