"""Commands on what answers: model, draft, sampling, race, colours."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.conversations.chat import SETTINGS, speculation_told
from edgespec.errors import InvalidRequest
from edgespec.service.client import standing_of
from edgespec.text.chat_template import Message
from edgespec.tui.picker import Picker
from edgespec.tui.race import Race

if TYPE_CHECKING:
    from edgespec.tui.app import ChatApp


async def spec(app: ChatApp, argument: str) -> None:
    """On and off while an answer is generated too."""
    standing = standing_of(app.stage)
    if argument:
        standing = await asyncio.to_thread(app.stage.speculate, argument)
    await app.say(speculation_told(standing.speculation, standing.draft, is_paused=standing.is_paused))
    app.show_instruments()


async def draft(app: ChatApp, argument: str) -> None:
    if not argument:
        await app.say(f"draft: {standing_of(app.stage).draft}")
        return
    app.require_idle()
    standing_of(app.stage)
    app.change_draft(replace(app.request, draft=argument))


async def model(app: ChatApp, argument: str) -> None:
    if argument:
        app.require_idle()
        app.open(replace(app.request, model=argument, draft="auto"))
        return

    async def chosen(name: str | None) -> None:
        if name is not None:
            await app.run_command(f"model {name}")

    app.push_screen(Picker(app.stage, app.request, app.reporter, is_idle=app.job is None), chosen)


async def settings(app: ChatApp, argument: str) -> None:
    name, _, value = argument.partition(" ")
    chat = app.chat
    if name:
        chat.set(name.replace("-", "_"), value.strip())
        app.keeper.use_system()
    shown = [name.replace("-", "_")] if name else SETTINGS
    values = ((s, chat.setting(s)) for s in shown)
    await app.say(", ".join(f"{name} {'-' if value is None else value}" for name, value in values))


async def system(app: ChatApp, argument: str) -> None:
    app.chat.set("system", argument)
    app.keeper.use_system()
    await app.say(f"system message: {argument or 'none'}")


async def race(app: ChatApp, argument: str) -> None:
    app.require_idle()
    standing, messages = standing_of(app.stage), app.chat.messages
    if standing.speculation.is_plain:
        raise InvalidRequest("there is no draft to race with.", hint="/draft ngram or /draft auto chooses one.")
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if not argument and last is None:
        raise InvalidRequest("there is no question to race.", hint="For example: /race def fibonacci(n):")
    asked = [*messages, Message("user", argument)] if argument else messages[: (last or 0) + 1]
    request = replace(app.chat.request(), prompt=(*app.chat.system_messages, *asked))
    app.push_screen(Race(app.stage, request, standing.speculation))


async def theme(app: ChatApp, argument: str) -> None:
    names = ", ".join(sorted(app.available_themes))
    if not argument:
        await app.say(f"theme {app.theme}; there are {names}")
    elif argument not in app.available_themes:
        raise InvalidRequest(f"there is no theme '{argument}'.", hint=f"There are {names}.")
    else:
        app.theme = argument
