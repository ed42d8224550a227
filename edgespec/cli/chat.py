"""`edgespec chat`: full-screen on a terminal, line by line elsewhere."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from edgespec.api.options import resolve_sampling
from edgespec.chat import Store
from edgespec.chat.own_model import OwnModel
from edgespec.chat.recorder import open_store
from edgespec.chat.state import Chat
from edgespec.cli.completion import complete_conversation, complete_model
from edgespec.cli.engine import open_engine
from edgespec.cli.options import generation_options, load_config, model_option, offer, preset_option, rare_option
from edgespec.cli.plain_chat import PlainChat
from edgespec.client.client import EngineClient
from edgespec.client.process import EngineProcess
from edgespec.core.sampling import SamplingParams
from edgespec.errors import InvalidRequest
from edgespec.models.load_config import LoadConfig
from edgespec.models.registry import SamplingDefaults
from edgespec.options import LEARN


@click.command("chat")
@click.argument("model", required=False, metavar="[REF]", shell_complete=complete_model)
@click.option("--plain", is_flag=True, help="Chat line by line instead of full-screen.")
@model_option
@click.option("--continue", "-c", "continue_last", is_flag=True, help="Continue the last conversation, with its model.")
@click.option(
    "--resume",
    type=click.IntRange(min=1),
    metavar="ID",
    help="Continue a conversation; `edgespec history` lists them.",
    shell_complete=complete_conversation,
)
@rare_option("--rolling", is_flag=True, help="Leave out the oldest turns when the context is full.")
@click.option("--incognito", is_flag=True, help="Save nothing of this chat: no conversation, no prompts, no memory.")
@offer(LEARN)
@preset_option
@generation_options
def chat_command(
    model: str | None,
    named_model: str | None,
    plain: bool,
    continue_last: bool,
    resume: int | None,
    rolling: bool,
    incognito: bool,
    **options: Any,
) -> int:
    """Chat with a model: an alias, user/repo:QUANT, hf:user/repo/file.gguf, or a path.

    Without REF, a conversation that is continued opens its own model. A new one opens EDGESPEC_MODEL, else the model
    that was opened last, else smollm2-135m if its package is installed; else a list of small models is shown first. F1
    (or /help) lists keys and commands. Chats on a terminal are saved in the data folder that `edgespec doctor` shows.
    """
    if model is not None and named_model is not None:
        raise click.UsageError(f"There are two models, '{model}' and '{named_model}': name one.")
    model = named_model if model is None else model
    if incognito and (continue_last or resume):
        raise InvalidRequest("a saved conversation is not incognito.", hint="Drop --incognito.")
    request = load_config(model, options | ({"memory": False} if incognito else {}))
    resolve_sampling(options, SamplingDefaults())  # raises before anything is loaded
    settings = options["max_tokens"], options["seed"], options["stop"]
    chat = Chat(options["system"], SamplingParams(), *settings, rolling=rolling)
    sampling = partial(resolve_sampling, options)
    is_full_screen = not plain and not options["verbose"] and _is_terminal()
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    is_kept = is_full_screen or continue_last or resume is not None or (is_typed and not incognito)
    store = open_store() if is_kept else Store.in_memory()
    if continue_last and resume is None:
        resume = next((conversation.id for conversation in store.recent(1)), None)
    request = _choose_model(store, resume, request)
    if is_full_screen:
        return _chat_full_screen(request, chat, store, sampling, resume, is_incognito=incognito)
    with closing(_start_engine(request, verbose=options["verbose"])) as engine:
        room = PlainChat(engine, request, chat, store, sampling, is_interactive=is_typed)
        if store.notice is not None:
            click.echo(f"note: {store.notice}", err=True)
        if incognito:
            room.recorder.start_incognito(is_on=True)
        room.open()
        if resume is not None:
            room.resume(resume)
        return room.loop()


def _chat_full_screen(
    request: LoadConfig,
    chat: Chat,
    store: Store,
    sampling: Callable[[SamplingDefaults], SamplingParams],
    resume: int | None,
    *,
    is_incognito: bool,
) -> int:
    gc.disable()  # while modules are loaded, which are never freed
    from edgespec.chat.tui.app import ChatApp

    gc.enable()
    with closing(EngineProcess("F5 opens the model again.")) as client:
        app = partial(ChatApp, request, chat, store, client, is_incognito=is_incognito)
        is_choosing = request.model is None and request.backend is None and resume is None
        window = app(sampling=sampling, resume=resume, is_choosing=is_choosing)
        window.run()
        if window.failure is not None:
            raise window.failure
        return 0


def _start_engine(request: LoadConfig, *, verbose: bool) -> EngineClient:
    """An engine in a process of its own, or one in this process that shows the log of its runtime."""
    return open_engine(request, verbose=True) if verbose else EngineProcess("A new message opens the model again.")


def _choose_model(store: Store, id: int | None, request: LoadConfig) -> LoadConfig:
    """`request` for the model of a stored conversation, or of a new one if none is continued.

    What the user gave stays. Raises InvalidRequest.
    """
    from edgespec.chat.tui.settings import find_first_model

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
        backend=own.backend if is_default["backend"] else request.backend,
    )


def _is_terminal() -> bool:
    """Whether stdin, stdout and stderr are a terminal that can draw a full screen."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(each is not None and each.isatty() for each in streams) and os.environ.get("TERM") != "dumb"
