"""`edgespec serve`: models over HTTP, through OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import PARALLEL, open_request, serving_options

if TYPE_CHECKING:
    from edgespec.planner.plan import LoadConfig
    from edgespec.server.guard import Rules

PORT = 7437
_EMBEDDED = "embedded"


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[[NAME=]REF]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes any free one.")
@click.option("--api-key", envvar="EDGESPEC_API_KEY", help="Key that callers must send. [env: EDGESPEC_API_KEY]")
@click.option("--no-key", is_flag=True, help="Listen beyond this machine without a key: whoever reaches it may call.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Host name to answer to, besides localhost.")
@click.option("--allow-origin", multiple=True, metavar="URL", help="Origin of web pages that may call.")
@click.option("--keep-alive", type=click.FloatRange(0), default=300, show_default=True, metavar="SECONDS",
              help="Close a model that has been idle for so long.")  # fmt: skip
@click.option("--open-at-most", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N",
              help="Models in memory at once.")  # fmt: skip
@click.option("--queue", type=click.IntRange(0, 10_000), default=64, show_default=True, metavar="N",
              help="Calls that may wait for a model; others are told to try again later.")  # fmt: skip
@click.option("--call-seconds", type=click.FloatRange(0.1), default=600, show_default=True, metavar="SECONDS",
              help="Longest time of an answer, which is cut off then.")  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE",
              help="TOML: a table [NAME] for each further model, with model = REF and its own options.")  # fmt: skip
@PARALLEL
@serving_options
def serve_command(models: tuple[str, ...], host: str, port: int, **given: Any) -> int:
    """Serve models at /v1, as OpenAI (chat, completions, responses) and Anthropic (messages) do, drafted speculatively.

    Without REF the embedded pair answers. Models are opened by the first call. The page at / shows how it does.
    """
    from edgespec.server.app import application
    from edgespec.server.metrics import ServerMetrics
    from edgespec.server.models import Models, Policy

    rules = _rules(host, given)
    tally = ServerMetrics()
    policy = Policy(given["open_at_most"], given["queue"], given["keep_alive"], given["call_seconds"])
    requests = _requests(models, given)
    listening = _listen(host, port)
    at = listening.getsockname()
    name = f"[{host}]" if ":" in host else host
    click.echo(f"Serving {', '.join(requests)} at http://{name}:{at[1]}/v1; Ctrl-C ends it.")
    return _run(application(Models(requests, policy, tally), rules, tally), listening)


def _run(app: Callable[..., Any], listening: socket.socket) -> int:
    """Serve an ASGI application until Ctrl-C."""
    import asyncio
    import logging

    import uvicorn

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, datefmt="%H:%M:%S")

    async def main() -> None:
        config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, server_header=False,
                                timeout_graceful_shutdown=3, lifespan="on")  # fmt: skip
        await uvicorn.Server(config).serve([listening])

    try:
        asyncio.run(main())
    except KeyboardInterrupt:  # which uvicorn raises again once it has shut down
        return 130
    return 0


def _requests(models: tuple[str, ...], given: dict[str, Any]) -> dict[str, LoadConfig]:
    """What to open by the names that clients use. Raises InvalidRequest."""
    from edgespec.cli.serving_config import configured
    from edgespec.errors import InvalidRequest

    config: Path | None = given["config"]
    requests = configured(config) if config is not None else {}
    for text in models or (() if requests else ("",)):
        name, equals, reference = text.partition("=")
        if not equals:
            name, reference = _public(text), text
        if not name or name in requests:
            told = f"two models would be called '{name}'." if name else f"'{text}' gives no name."
            raise InvalidRequest(told, hint="Name them: edgespec serve NAME=REF.")
        requests[name] = open_request(reference or None, given)
    return requests


def _public(reference: str) -> str:
    """The name that clients use: of a file its name alone, so that no path of this machine is told."""
    if not reference:
        return _EMBEDDED
    path = PurePath(reference)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_absolute() or reference.startswith((".", "~")) else reference


def _rules(host: str, given: dict[str, Any]) -> Rules:
    """Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest
    from edgespec.server.guard import LOOPBACK, Rules

    key = given["api_key"] or None
    origins = frozenset(given["allow_origin"])
    hosts = LOOPBACK | {name.lower() for name in given["allow_host"]}
    if host in LOOPBACK:
        return Rules(key, hosts, origins)
    if key is None and not given["no_key"]:
        raise InvalidRequest(
            f"whoever reaches {host} could use this server.", hint="Set --api-key, or waive it with --no-key."
        )
    return Rules(key, None if key is not None else hosts | {host.lower(), f"[{host.lower()}]"}, origins)


def _listen(host: str, port: int) -> socket.socket:
    """Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # callers may come from now on, and wait until the server is up
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen at {host}, port {port}: {error.strerror}.", hint="Choose another --port or --host."
        ) from error
    return listening
