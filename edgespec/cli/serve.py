"""`edgespec serve`: models over HTTP with OpenAI-compatible and Anthropic-compatible APIs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_served
from edgespec.cli.listening import access_rules, listen, listening_options
from edgespec.cli.options import DURATION, PARALLEL, load_config, rare_option, serving_options

if TYPE_CHECKING:
    from edgespec.cli.listening import Listening
    from edgespec.planner.plan import LoadConfig
    from edgespec.server.policy import Policy
    from edgespec.server.remote_model import RemoteModel

_EMBEDDED = "embedded"


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[[NAME=]REF]...", shell_complete=complete_served)
@listening_options
@click.option(
    "--keep-alive",
    type=DURATION,
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="Unload a model that has been idle for this long, in seconds or as 90s, 10m, 2h; -1: never.",
)
@rare_option(
    "--preload",
    multiple=True,
    metavar="NAME",
    help="Load this model at the start instead of with its first request; repeatable.",
)
@rare_option(
    "--open-at-most",
    "max_open",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Maximum number of models in memory.",
)
@rare_option(
    "--queue",
    type=click.IntRange(0, 10_000),
    default=64,
    show_default=True,
    metavar="N",
    help="Requests that may wait for a model; further ones get 429.",
)
@rare_option(
    "--call-seconds",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Maximum duration of a request, whose answer ends early then. Loading the model counts, the queue does not.",
)
@rare_option(
    "--silence-seconds",
    "max_silence_s",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="End the process of a model that gives no sign of life for this long; the next request loads it again.",
)
@rare_option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of further models: a table [NAME] for each, with model = REF and its options, or with "
    'backend = "openai" and the url of another server.',
)
@rare_option(
    "--strict-names", is_flag=True, help="Refuse a request that does not name the model, even if there is only one."
)
@rare_option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged: debug adds polls of /health, /metrics and /props, warning leaves sound requests out.",
)
@PARALLEL
@serving_options
def serve_command(models: tuple[str, ...], log_level: str, **options: Any) -> int:
    """Serve models at /v1 like OpenAI (chat, completions, responses) and Anthropic (messages).

    Without REF, the small model of `edgespec chat` answers. The first request loads a model. The page at / is a chat.
    """
    from edgespec.registry.schema import EMBEDDED_ALIAS
    from edgespec.server.app import application
    from edgespec.server.metrics import ServerMetrics
    from edgespec.server.models import Models
    from edgespec.server.policy import Policy

    if options["memory"] is None and options["api_key"] and not options["key_file"]:
        options["memory"] = False
    rules = access_rules(options)
    metrics = ServerMetrics()
    limits = ("max_open", "queue", "keep_alive", "timeout_s", "max_silence_s", "strict_names")
    policy = Policy(*(options[name] for name in limits))
    configs, keep_alive_s, remotes = _read_configs(models, options)
    preload = _check_preload(options["preload"], configs, policy)
    aliases = {EMBEDDED_ALIAS: _EMBEDDED}  # as the other commands call the embedded model
    app = application(Models(configs, policy, metrics, aliases, keep_alive_s, remotes), rules, metrics, preload)
    # SIGTERM ends the program in order, with 0; uvicorn raises it again after its shutdown.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    with listen(options) as listening:
        click.echo(f"Serving {', '.join((*configs, *remotes))} at {', '.join(listening.urls)}; press Ctrl-C to stop.")
        for name in (name for name, each in remotes.items() if each.sends_plain_key):
            click.echo(f"warning: the key of '{name}' crosses the network as plain text; use https.", err=True)
        return run_app(app, listening, log_level)


def run_app(app: Callable[..., Any], listening: Listening, log_level: str) -> int:
    """Serve an ASGI application until Ctrl-C."""
    import asyncio
    import logging

    from edgespec.cli.interrupts import INTERRUPTED
    from edgespec.server.connections import serve

    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=log_level.upper(), datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request of a download
    try:
        asyncio.run(serve(app, listening.sockets, listening.tls))
    except KeyboardInterrupt:  # raised again by uvicorn after its shutdown
        return INTERRUPTED
    return 0


def _read_configs(
    models: tuple[str, ...], options: dict[str, Any]
) -> tuple[dict[str, LoadConfig], dict[str, float], dict[str, RemoteModel]]:
    """What to load, by the names that clients use, how long some of them stay loaded, and the models of other servers.

    Raises InvalidRequest.
    """
    from edgespec.cli.serving_config import ModelTable, read_config
    from edgespec.errors import InvalidRequest
    from edgespec.registry.schema import load_registry

    config: Path | None = options["config"]
    found = read_config(config) if config is not None else {}
    tables = {name: table for name, table in found.items() if isinstance(table, ModelTable)}
    remotes = {name: table for name, table in found.items() if not isinstance(table, ModelTable)}
    configs = {name: table.config for name, table in tables.items()}
    for text in models or (() if found else (load_registry().default,)):
        name, equals, reference = text.partition("=")
        if not equals:
            name, reference = public_name(text), text
        if not name or name in configs or name in remotes:
            message = f"two models have the name '{name}'." if name else f"'{text}' has no name."
            raise InvalidRequest(message, hint="Name each model: edgespec serve NAME=REF.")
        configs[name] = load_config(reference or None, options)
    if options["memory"] is False:  # for the tables too
        configs = {name: replace(each, memory=None) for name, each in configs.items()}
        remotes = {name: replace(each, remembers=False) for name, each in remotes.items()}
    keep_alive_s = {name: table.keep_alive_s for name, table in tables.items() if table.keep_alive_s is not None}
    return configs, keep_alive_s, remotes


def _check_preload(names: tuple[str, ...], configs: Collection[str], policy: Policy) -> tuple[str, ...]:
    """The names of `--preload`. Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest

    for name in names:
        if name not in configs:
            known = ", ".join(configs) or "none; models of other servers are not loaded here"
            raise InvalidRequest(f"--preload names no model: '{name}'.", hint=f"There are: {known}.")
    if len(set(names)) > policy.max_open:
        message = f"--preload names {len(set(names))} models, and --open-at-most is {policy.max_open}."
        raise InvalidRequest(message, hint="Raise --open-at-most.")
    return names


def public_name(reference: str) -> str:
    """The name that clients use: for a file, its name without the folder, so that clients see no local path."""
    from edgespec.registry.schema import EMBEDDED_ALIAS

    if reference == EMBEDDED_ALIAS:
        return _EMBEDDED
    path = PurePath(reference)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_absolute() or reference.startswith((".", "~")) else reference
