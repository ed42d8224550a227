"""`edgespec serve`: models over HTTP with OpenAI-compatible and Anthropic-compatible APIs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_served
from edgespec.cli.options import PARALLEL, load_config, serving_options

if TYPE_CHECKING:
    from edgespec.planner.plan import LoadConfig
    from edgespec.server.guard import Rules

PORT = 7437
_EMBEDDED = "embedded"


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[[NAME=]REF]...", shell_complete=complete_served)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--api-key", envvar="EDGESPEC_API_KEY", help="API key that clients must send. [env: EDGESPEC_API_KEY]")
@click.option("--no-key", is_flag=True, help="Allow requests without a key from other machines.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Host name to accept besides localhost; repeatable.")
@click.option(
    "--allow-origin", multiple=True, metavar="URL", help="Origin of web pages that may send requests; repeatable."
)
@click.option(
    "--keep-alive",
    type=click.FloatRange(0),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Unload a model that has been idle for this long.",
)
@click.option(
    "--open-at-most",
    "max_open",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Maximum number of models in memory.",
)
@click.option(
    "--queue",
    type=click.IntRange(0, 10_000),
    default=64,
    show_default=True,
    metavar="N",
    help="Requests that may wait for a model; further ones get 429.",
)
@click.option(
    "--call-seconds",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Maximum duration of a request, whose answer ends early then. Loading the model counts, the queue does not.",
)
@click.option(
    "--silence-seconds",
    "max_silence_s",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="End the process of a model that gives no sign of life for this long; the next request loads it again.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of further models: a table [NAME] for each, with model = REF and its options.",
)
@click.option(
    "--strict-names", is_flag=True, help="Refuse a request that does not name the model, even if there is only one."
)
@PARALLEL
@serving_options
def serve_command(models: tuple[str, ...], host: str, port: int, **options: Any) -> int:
    """Serve models at /v1 like OpenAI (chat, completions, responses) and Anthropic (messages).

    Without REF, a small embedded model answers. The first request loads a model. The page at / shows statistics.
    """
    from edgespec.registry.schema import DEFAULT_ALIAS
    from edgespec.server.app import application
    from edgespec.server.metrics import ServerMetrics
    from edgespec.server.model_slot import Policy
    from edgespec.server.models import Models

    rules = _access_rules(host, options)
    metrics = ServerMetrics()
    limits = ("max_open", "queue", "keep_alive", "timeout_s", "max_silence_s", "strict_names")
    policy = Policy(*(options[name] for name in limits))
    configs = _read_configs(models, options)
    listener = _listen(host, port)
    bound_port = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    click.echo(f"Serving {', '.join(configs)} at http://{name}:{bound_port}/v1; press Ctrl-C to stop.")
    aliases = {DEFAULT_ALIAS: _EMBEDDED}  # as the other commands call the embedded model
    return _run(application(Models(configs, policy, metrics, aliases), rules, metrics), listener)


def _run(app: Callable[..., Any], listener: socket.socket) -> int:
    """Serve an ASGI application until Ctrl-C."""
    import asyncio
    import logging

    from edgespec.cli.interrupts import INTERRUPTED
    from edgespec.server.connections import serve

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, datefmt="%H:%M:%S")
    try:
        asyncio.run(serve(app, listener))
    except KeyboardInterrupt:  # raised again by uvicorn after its shutdown
        return INTERRUPTED
    return 0


def _read_configs(models: tuple[str, ...], options: dict[str, Any]) -> dict[str, LoadConfig]:
    """What to load, by the names that clients use. Raises InvalidRequest."""
    from edgespec.cli.serving_config import read_config
    from edgespec.errors import InvalidRequest

    config: Path | None = options["config"]
    configs = read_config(config) if config is not None else {}
    for text in models or (() if configs else ("",)):
        name, equals, reference = text.partition("=")
        if not equals:
            name, reference = _public_name(text), text
        if not name or name in configs:
            message = f"two models have the name '{name}'." if name else f"'{text}' has no name."
            raise InvalidRequest(message, hint="Name each model: edgespec serve NAME=REF.")
        configs[name] = load_config(reference or None, options)
    return configs


def _public_name(reference: str) -> str:
    """The name that clients use: for a file, its name without the folder, so that clients see no local path."""
    if not reference:
        return _EMBEDDED
    path = PurePath(reference)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_absolute() or reference.startswith((".", "~")) else reference


def _access_rules(host: str, options: dict[str, Any]) -> Rules:
    """The hosts, origins and key that the server accepts. Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest
    from edgespec.server.guard import LOOPBACK, Rules
    from edgespec.server.keys import Caller, Key, Keys, hash_key

    key = options["api_key"] or None
    keys = Keys([Key(Caller("api-key", may_manage=True), hash_key(key))]) if key is not None else None
    origins = frozenset(map(_parse_origin, options["allow_origin"]))
    if "*" in origins and key is None:
        raise InvalidRequest("any web page could use a server without a key.", hint="Set --api-key, or name origins.")
    hosts = LOOPBACK | {name.lower() for name in options["allow_host"]}
    if host in LOOPBACK:
        return Rules(keys, hosts, origins)
    if key is None and not options["no_key"]:
        raise InvalidRequest(
            f"other machines could use a server at {host} without a key.", hint="Set --api-key, or pass --no-key."
        )
    return Rules(keys, None if key is not None else hosts | {host.lower(), f"[{host.lower()}]"}, origins)


def _parse_origin(text: str) -> str:
    """An origin as browsers write it, or "*". Raises InvalidRequest."""
    from urllib.parse import urlsplit

    from edgespec.errors import InvalidRequest

    if text == "*":
        return text
    try:
        url = urlsplit(text.rstrip("/"))
        port = "" if url.port in (None, {"http": 80, "https": 443}.get(url.scheme)) else f":{url.port}"
    except ValueError:
        url, port = urlsplit(""), ""
    if not url.scheme or not url.hostname or "@" in url.netloc or url.path or url.query or url.fragment:
        raise InvalidRequest(
            f"'{text}' is not the origin of a web page.", hint="Write it like http://localhost:3000, or * for any."
        )
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}{port}"


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; clients can connect to it before the server runs. Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm only for sockets that name TCP; with it a reply waits 40 ms for an ACK.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {host}, port {port}: {error.strerror}.", hint="Choose another --port or --host."
        ) from error
    return listener
