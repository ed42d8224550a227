"""Commands on what answers: model, draft, sampling, race, colours."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from edgespec.conversations.chat import SETTINGS, speculation_told
from edgespec.errors import InvalidRequest
from edgespec.service.client import require_model
from edgespec.text.chat_template import Message
from edgespec.tui.app import ChatApp
from edgespec.tui.picker import Picker
from edgespec.tui.race import Race


async def spec(app: ChatApp, argument: str) -> None:
    """On and off while an answer is generated too."""
    model_info = require_model(app.client)
    if argument:
        model_info = await asyncio.to_thread(app.client.speculate, argument)
    await app.say(speculation_told(model_info.speculation, model_info.draft, is_paused=model_info.is_paused))
    app.show_instruments()


async def draft(app: ChatApp, argument: str) -> None:
    if not argument:
        await app.say(f"draft: {require_model(app.client).draft}")
        return
    app.require_idle()
    require_model(app.client)
    app.change_draft(replace(app.request, draft=argument))


async def model(app: ChatApp, argument: str) -> None:
    if argument:
        app.require_idle()
        app.open(replace(app.request, model=argument, draft="auto"))
        return

    async def chosen(name: str | None) -> None:
        if name is not None:
            await app.run_command(f"model {name}")

    app.push_screen(Picker(app.client, app.request, app.reporter, is_idle=app.job is None), chosen)


async def settings(app: ChatApp, argument: str) -> None:
    name, _, value = argument.partition(" ")
    chat = app.chat
    if name:
        chat.set(name.replace("-", "_"), value.strip())
        app.recorder.use_system()
    shown = [name.replace("-", "_")] if name else SETTINGS
    values = ((s, chat.setting(s)) for s in shown)
    await app.say(", ".join(f"{name} {'-' if value is None else value}" for name, value in values))


async def system(app: ChatApp, argument: str) -> None:
    app.chat.set("system", argument)
    app.recorder.use_system()
    await app.say(f"system message: {argument or 'none'}")


async def race(app: ChatApp, argument: str) -> None:
    app.require_idle()
    model_info, messages = require_model(app.client), app.chat.messages
    if model_info.speculation.is_plain:
        raise InvalidRequest("there is no draft to race with.", hint="/draft ngram or /draft auto chooses one.")
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if not argument and last is None:
        raise InvalidRequest("there is no question to race.", hint="For example: /race def fibonacci(n):")
    asked = [*messages, Message("user", argument)] if argument else messages[: (last or 0) + 1]
    request = replace(app.chat.request(), prompt=(*app.chat.system_messages, *asked))
    app.push_screen(Race(app.client, request, model_info.speculation))


async def theme(app: ChatApp, argument: str) -> None:
    names = ", ".join(sorted(app.available_themes))
    if not argument:
        await app.say(f"theme {app.theme}; there are {names}")
    elif argument not in app.available_themes:
        raise InvalidRequest(f"there is no theme '{argument}'.", hint=f"There are {names}.")
    else:
        app.theme = argument
