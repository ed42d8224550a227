"""Scenes: what a test does in a running chat, by the command that it tries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from tests.tui.driving import Driver, in_app

Scene = Callable[[Driver, Path], Awaitable[None]]


class Scenes(dict[str, Scene]):
    """Scenes by the names of commands."""

    def add(self, name: str) -> Callable[[Scene], Scene]:
        def kept(scene: Scene) -> Scene:
            self[name] = scene
            return scene

        return kept

    def play(self, name: str, folder: Path) -> None:
        async def test(chat: Driver) -> None:
            await self[name](chat, folder)
            assert chat.app.is_running

        in_app(test)()


async def again(chat: Driver, line: str) -> str:
    """Another answer."""
    last = max(turn.id for turn in chat.turns)
    await chat.send(line)
    await chat.until(lambda: chat.turns[-1].id > last and chat.turns[-1].finished and chat.app.activity.job is None)
    return chat.texts[-1]


async def varied(chat: Driver) -> None:
    """From now on no two answers are the same."""
    await chat.hears("/set temperature 1", "1")
    chat.app.chat.sampling = replace(chat.app.chat.sampling, logit_bias=((256, -1000.0),))  # none is empty
    chat.app.chat.seed = None
