"""Commands that change the model, the draft, the settings or the theme; the race."""

from __future__ import annotations

from dataclasses import replace

from edgespec.conversations.chat import NONE, describe_speculation
from edgespec.conversations.commands import apply_setting
from edgespec.errors import InvalidRequest
from edgespec.planner.draft_request import describe_words
from edgespec.service.client import require_model
from edgespec.text.chat_template import Message
from edgespec.tui.app import ChatApp
from edgespec.tui.downloads import Downloads
from edgespec.tui.race import Race


async def spec(app: ChatApp, argument: str) -> None:
    """`on` and `off` take effect during an answer too."""
    model_info = require_model(app.client)
    if argument:
        model_info = await app.client.speculate(argument).wait()
    await app.say(describe_speculation(model_info.speculation, model_info.draft, is_paused=model_info.is_paused))
    app.refresh_instruments()


async def draft(app: ChatApp, argument: str) -> None:
    if not argument:
        await app.say(f"draft: {require_model(app.client).draft} (choose from {describe_words()})")
        return
    app.activity.require_idle()
    require_model(app.client)
    app.change_draft(replace(app.request, draft=argument))


async def model(app: ChatApp, argument: str) -> None:
    if argument:
        app.activity.require_idle()
        app.open(replace(app.request, model=argument, draft="auto"))
        return

    from edgespec.tui.picker import Pick, Picker  # not before it is needed: the planner behind it takes 50 ms

    async def load(pick: Pick | None) -> None:
        if pick is not None and pick.download:
            app.query_one(Downloads).start(replace(app.request, model=pick.model, draft="auto"))
        elif pick is not None:
            await app.run_command(f"model {pick.model}")

    is_idle = app.activity.job is None
    app.push_screen(Picker(app.client, app.request, app.reporter, is_idle=is_idle, is_first=app.is_choosing), load)


async def settings(app: ChatApp, argument: str) -> None:
    shown = apply_setting(app.chat, argument)
    if argument:
        app.recorder.use_system()
    await app.say(", ".join(f"{name} {value}" for name, value in shown))


async def system(app: ChatApp, argument: str) -> None:
    if argument:
        app.chat.set("system", argument)
        app.recorder.use_system()
    await app.say(f"system message: {app.chat.system or NONE}")


async def race(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    model_info, messages = require_model(app.client), app.chat.messages[app.chat.left_out :]
    if model_info.speculation.is_plain:
        raise InvalidRequest("there is no draft to race.", hint="/draft ngram or /draft auto chooses one.")
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if not argument and last is None:
        raise InvalidRequest("there is no question to race.", hint="For example: /race def fibonacci(n):")
    prompt = [*messages, Message("user", argument)] if argument else messages[: (last or 0) + 1]
    request = replace(app.chat.request(model_info.sampling), prompt=(*app.chat.system_messages, *prompt))

    async def go_on(_: None) -> None:
        await app.send_next()

    app.push_screen(Race(app.client, request, model_info.speculation, model_info.plain_speed), go_on)


async def theme(app: ChatApp, argument: str) -> None:
    names = ", ".join(sorted(app.available_themes))
    if not argument:
        await app.say(f"theme {app.theme}; available: {names}")
    elif argument not in app.available_themes:
        raise InvalidRequest(f"there is no theme '{argument}'.", hint=f"Available: {names}.")
    else:
        app.theme = argument
