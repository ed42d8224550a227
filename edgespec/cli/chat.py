"""`edgespec chat`: the full screen on a terminal, line by line elsewhere."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import click

from edgespec.cli.options import generation_options, open_request, sampling_params


@click.command("chat")
@click.argument("model", required=False, metavar="[REF]")
@click.option("--plain", is_flag=True, help="Line by line, as in a pipe, instead of the whole screen.")
@click.option("--continue", "goes_on", is_flag=True, help="Go on with the last conversation.")
@click.option("--resume", type=click.IntRange(min=1), metavar="ID", help="Go on with that one; /history lists them.")
@click.option("--race", metavar="TEXT", help="Begin with a race: TEXT answered plainly and speculatively.")
@generation_options
def chat_command(
    model: str | None, plain: bool, goes_on: bool, resume: int | None, race: str | None, **given: Any
) -> int:
    """Talk to a model: an alias, user/repo:QUANT, hf:user/repo/file.gguf, or a path.

    Without REF the embedded pair answers; it completes Python code. F1 (or /help) lists keys and commands. On a
    terminal conversations are kept in the data folder that `edgespec doctor` names.
    """
    from edgespec.cli.host import Host
    from edgespec.cli.repl import Repl
    from edgespec.conversations.chat import Chat
    from edgespec.core.sampling import SamplingParams
    from edgespec.errors import InvalidRequest
    from edgespec.registry.schema import SamplingDefaults

    wanted = open_request(model, given)
    sampling_params(given, SamplingDefaults())  # refuse what is wrong before anything is loaded
    chat = Chat(given["system"], SamplingParams(), given["max_tokens"], given["seed"], given["stop"])
    if not plain and not given["verbose"] and _is_terminal():
        from edgespec.service.process import EngineProcess
        from edgespec.tui.app import ChatApp
        from edgespec.tui.commands import SlashCommands
        from edgespec.tui.recorder import opened_store

        store = opened_store()
        if goes_on and resume is None:
            resume = next((conversation.id for conversation in store.recent(1)), None)
        sampling = partial(sampling_params, given)
        then = f"race {race}" if race else ""
        client = EngineProcess()
        try:
            app = ChatApp(wanted, chat, store, client, SlashCommands(), sampling=sampling, resume=resume, then=then)
            return app.run() or 0
        finally:
            client.close()
    if goes_on or resume or race:
        raise InvalidRequest(
            "--continue, --resume and --race need the whole screen.", hint="Leave out --plain, and use a terminal."
        )
    host = Host(wanted, verbose=given["verbose"])
    try:
        chat.sampling = sampling_params(given, host.loaded.sampling)
        return Repl(host, wanted, chat, interactive=sys.stdin is not None and sys.stdin.isatty()).loop()
    finally:
        host.close()


def _is_terminal() -> bool:
    """Whether a person sits at both ends, with a screen to draw on."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(each is not None and each.isatty() for each in streams) and os.environ.get("TERM") != "dumb"
