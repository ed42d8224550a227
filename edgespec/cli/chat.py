"""`edgespec chat`: full-screen on a terminal, line by line elsewhere."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from edgespec.cli.completers import complete_conversation, complete_model
from edgespec.cli.options import LEARN, generation_options, load_config, rare_option, sampling_params

if TYPE_CHECKING:
    from edgespec.backends import BackendName
    from edgespec.conversations import Store
    from edgespec.planner.plan import LoadConfig


@click.command("chat")
@click.argument("model", required=False, metavar="[REF]", shell_complete=complete_model)
@click.option("--plain", is_flag=True, help="Chat line by line instead of full-screen.")
@click.option("--continue", "continue_last", is_flag=True, help="Continue the last conversation, with its model.")
@click.option(
    "--resume",
    type=click.IntRange(min=1),
    metavar="ID",
    help="Continue a conversation; `edgespec history` lists them.",
    shell_complete=complete_conversation,
)
@rare_option("--race", metavar="TEXT", help="Start with a race: answer TEXT with and without speculative decoding.")
@rare_option("--rolling", is_flag=True, help="Leave out the oldest turns when the context is full.")
@click.option("--incognito", is_flag=True, help="Save nothing of this chat: no conversation, no prompts, no memory.")
@LEARN
@generation_options
def chat_command(
    model: str | None,
    plain: bool,
    continue_last: bool,
    resume: int | None,
    race: str | None,
    rolling: bool,
    incognito: bool,
    **options: Any,
) -> int:
    """Chat with a model: an alias, user/repo:QUANT, hf:user/repo/file.gguf, or a path.

    Without REF, a conversation that is continued opens its own model. A new one opens EDGESPEC_MODEL, else the model
    that was opened last, else smollm2-135m if its package is installed; else a list of small models is shown first. F1
    (or /help) lists keys and commands. Full-screen chats are saved in the data folder that `edgespec doctor` shows.
    """
    from edgespec.conversations.chat import Chat
    from edgespec.core.sampling import SamplingParams
    from edgespec.errors import InvalidRequest
    from edgespec.registry.schema import SamplingDefaults

    if incognito and (continue_last or resume):
        raise InvalidRequest("a saved conversation is not incognito.", hint="Drop --incognito.")
    request = load_config(model, options | ({"memory": False} if incognito else {}))
    sampling_params(options, SamplingDefaults())  # raises before anything is loaded
    settings = options["max_tokens"], options["seed"], options["stop"]
    chat = Chat(options["system"], SamplingParams(), *settings, rolling=rolling)
    if not plain and not options["verbose"] and _is_terminal():
        gc.disable()  # while modules are loaded, none of which goes again
        from edgespec.service.process import EngineProcess
        from edgespec.tui.app import ChatApp
        from edgespec.tui.commands import SlashCommands
        from edgespec.tui.recorder import open_store

        gc.enable()
        store = open_store()
        if continue_last and resume is None:
            resume = next((conversation.id for conversation in store.recent(1)), None)
        request = _choose_model(store, resume, request)
        sampling = partial(sampling_params, options)
        then = f"race {race}" if race else ""
        with closing(EngineProcess("F5 opens the model again.")) as client:
            app = partial(ChatApp, request, chat, store, client, SlashCommands(), is_incognito=incognito)
            is_choosing = request.model is None and request.backend is None and resume is None
            return app(sampling=sampling, resume=resume, then=then, is_choosing=is_choosing).run() or 0
    if continue_last or resume or race:
        raise InvalidRequest(
            "--continue, --resume and --race need the full-screen chat.", hint="Drop --plain and run in a terminal."
        )
    from edgespec.cli.engine import open_engine
    from edgespec.cli.repl import Repl

    with closing(open_engine(request, verbose=options["verbose"])) as engine:
        chat.sampling = sampling_params(options, engine.require_loaded().info.sampling)
        is_interactive = sys.stdin is not None and sys.stdin.isatty()
        return Repl(engine, request, chat, interactive=is_interactive, is_incognito=incognito).loop()


def _choose_model(store: Store, id: int | None, request: LoadConfig) -> LoadConfig:
    """`request` for the model of a stored conversation, or of a new one where none is continued.

    What the user gave stays. Raises InvalidRequest.
    """
    from edgespec.conversations.own_model import OwnModel
    from edgespec.tui.settings import find_first_model

    if request.model is not None:
        return request
    if id is None or store.notice is not None:
        return replace(request, model=find_first_model()) if request.backend is None else request
    conversation = store.resume(id)
    own, context = OwnModel.find(conversation, store.path(conversation.leaf)), click.get_current_context()
    is_default = {name: context.get_parameter_source(name) is ParameterSource.DEFAULT for name in ("draft", "backend")}
    return replace(
        request,
        model=own.reference,
        draft=own.draft if is_default["draft"] else request.draft,
        backend=cast("BackendName | None", own.backend) if is_default["backend"] else request.backend,
    )


def _is_terminal() -> bool:
    """Whether stdin, stdout and stderr are a terminal that can draw a full screen."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(each is not None and each.isatty() for each in streams) and os.environ.get("TERM") != "dumb"
