"""`edgespec serve`: models over HTTP with OpenAI-compatible and Anthropic-compatible APIs."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from edgespec.cli.completion import complete_served
from edgespec.cli.interrupts import INTERRUPTED
from edgespec.cli.options import (
    FloatRange,
    add_options,
    load_config,
    offer,
    open_hub,
    rare_option,
    read_duration,
    serving_options,
)
from edgespec.cli.serving_config import read_config
from edgespec.errors import InvalidRequest
from edgespec.options import PARALLEL

if TYPE_CHECKING:
    import socket
    import ssl

    from edgespec.models.load_config import LoadConfig
    from edgespec.server.auth import Rules
    from edgespec.server.models import LocalModel
    from edgespec.server.record import Caller
    from edgespec.server.remote_client import RemoteModel

HOST = "127.0.0.1"
PORT = 7437
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_FILE = click.Path(path_type=Path)
_listening_options = add_options(
    click.option(
        "--host", "hosts", multiple=True, metavar="HOST", help=f"Address to listen on; repeatable.  [default: {HOST}]"
    ),
    click.option(
        "--port", "ports", multiple=True, type=click.IntRange(0, 65535), metavar="PORT",
        help=f"Port to listen on; repeatable. 0 takes a free one, 11434 is Ollama's.  [default: {PORT}]",
    ),
    rare_option(
        "--unix", type=_FILE, metavar="PATH",
        help="Unix socket to listen at, for this user only; the only address unless --host or --port is given.",
    ),
    rare_option("--tls-cert", type=_FILE, metavar="FILE", help="Certificate in PEM format, for https on all ports."),
    rare_option("--tls-key", type=_FILE, metavar="FILE", help="Private key of the certificate, in PEM format."),
    click.option(
        "--api-key", envvar="EDGESPEC_API_KEY", help="API key that clients must send. [env: EDGESPEC_API_KEY]"
    ),
    click.option(
        "--keys", "key_file", type=_FILE, metavar="FILE",
        help="File of API keys, of which clients must send one; see `edgespec key`.",
    ),
    rare_option("--no-key", is_flag=True, help="Allow requests without a key from other machines."),
    rare_option(
        "--allow-host", multiple=True, metavar="NAME", help="Host name to accept besides localhost; repeatable."
    ),
    rare_option(
        "--allow-origin", multiple=True, metavar="URL", help="Origin of web pages that may send requests; repeatable."
    ),
)  # fmt: skip


class _Listening(NamedTuple):
    """The sockets of a server, TLS for those that are not Unix sockets, and its URLs."""

    sockets: Sequence[socket.socket]
    tls: ssl.SSLContext | None
    urls: Sequence[str]


@contextmanager
def _listen(options: dict[str, Any]) -> Iterator[_Listening]:
    """Listen as the options say. SIGTERM then ends the program in order, with 0."""
    from edgespec.server.connections import listen_tcp, listen_unix, load_certificate

    certificate, key, unix = options["tls_cert"], options["tls_key"], options["unix"]
    if (certificate is None) != (key is None):
        raise InvalidRequest("TLS needs a certificate and its private key.", hint="Give --tls-cert and --tls-key.")
    tls = load_certificate(certificate, key) if certificate is not None else None
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # uvicorn raises it again after its shutdown
    scheme = "https" if tls is not None else "http"
    with ExitStack() as stack:
        sockets, urls = [], []
        hosts = _get_hosts(options)
        for host in hosts:
            for port in options["ports"] or (PORT,):
                sockets.append(stack.enter_context(listen_tcp(host, port, is_only=len(hosts) == 1)))
                name = f"[{host}]" if ":" in host else host
                urls.append(f"{scheme}://{name}:{sockets[-1].getsockname()[1]}/v1")
        if unix is not None:
            sockets.append(stack.enter_context(listen_unix(unix)))
            urls.append(f"unix:{unix}")
        yield _Listening(sockets, tls, urls)


def _get_hosts(options: dict[str, Any]) -> tuple[str, ...]:
    if options["hosts"]:
        return tuple(dict.fromkeys(options["hosts"]))
    return () if options["unix"] is not None and not options["ports"] else (HOST,)


def _access_rules(options: dict[str, Any]) -> Rules:
    """The hosts, origins and keys that the server accepts."""
    from edgespec.server.auth import LOOPBACK, Rules

    keys = _read_keys(options)
    origins = frozenset(map(_parse_origin, options["allow_origin"]))
    if "*" in origins and keys is None:
        raise InvalidRequest("any web page could use a server without a key.", hint="Set --api-key, or name origins.")
    names = LOOPBACK | {name.lower() for name in options["allow_host"]}
    public = [host for host in _get_hosts(options) if host not in LOOPBACK]
    if not public:
        return Rules(keys, names, origins)
    if keys is None and not options["no_key"]:
        raise InvalidRequest(
            f"other machines could use a server at {public[0]} without a key.",
            hint="Set --keys or --api-key, or pass --no-key.",
        )
    own = {name for host in public for name in (host.lower(), f"[{host.lower()}]")}
    return Rules(keys, None if keys is not None else names | own, origins)


def _read_keys(options: dict[str, Any]) -> Callable[[], Mapping[bytes, Caller]] | None:
    """The keys of --api-key and of the file; None without both."""
    from edgespec.server.auth import KeyFile
    from edgespec.server.record import ONLY_KEY, Caller, hash_key

    path, text = options["key_file"], options["api_key"]
    only = Caller(ONLY_KEY, may_manage=True, remembers=bool(options["memory"]))
    fixed = {hash_key(text): only} if text else {}
    if path is None:
        return (lambda: fixed) if fixed else None
    file = KeyFile(path)
    return lambda: {**file.read(), **fixed}


def _parse_origin(text: str) -> str:
    """An origin as browsers write it, or "*". Raises InvalidRequest."""
    origin = text.rstrip("/").lower()
    if text != "*" and not _ORIGIN.fullmatch(origin):
        hint = "Write it like http://localhost:3000, or * for any."
        raise InvalidRequest(f"'{text}' is not the origin of a web page.", hint=hint)
    return origin


_EMBEDDED = "embedded"


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[[NAME=]REF]...", shell_complete=complete_served)
@_listening_options
@click.option(
    "--keep-alive",
    type=read_duration,
    default="5m",
    metavar="DURATION",
    help="Unload a model that has been idle for this long, in seconds or as 90s, 10m, 2h; below 0: never.",
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
    metavar="N",
    help="Maximum number of models in memory.",
)
@rare_option(
    "--queue",
    type=click.IntRange(0, 10_000),
    default=64,
    metavar="N",
    help="Requests that may wait for a model; further ones get 429.",
)
@rare_option(
    "--call-seconds",
    "timeout_s",
    type=FloatRange(0.1),
    default=600,
    metavar="SECONDS",
    help="Maximum duration of an answer, which ends early then. The queue and the loading of the model do not count.",
)
@rare_option(
    "--silence-seconds",
    "max_silence_s",
    type=FloatRange(1),
    default=60,
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
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="What is logged: debug adds polls of /health, /metrics, /props and /slots, warning leaves sound requests out.",
)
@offer(PARALLEL)
@serving_options
def serve_command(models: tuple[str, ...], log_level: str, **options: Any) -> int:
    """Serve models at /v1 like OpenAI (chat, completions, responses) and Anthropic (messages).

    Without REF, the small model of `edgespec chat` answers. The first request loads a model. The page at / is a chat.
    """
    from edgespec.models.registry import EMBEDDED_ALIAS
    from edgespec.server.app import application
    from edgespec.server.http import Policy
    from edgespec.server.metrics import ServerMetrics
    from edgespec.server.models import Models
    from edgespec.server.remote_client import RemoteModel

    if options["memory"] is None and options["api_key"] and not options["key_file"]:
        options["memory"] = False
    rules = _access_rules(options)
    metrics = ServerMetrics()
    policy = Policy(
        max_open=options["max_open"],
        max_queue=options["queue"],
        keep_alive_s=options["keep_alive"],
        timeout_s=options["timeout_s"],
        max_silence_s=options["max_silence_s"],
        remembers=options["memory"] is not False,
    )
    found = read_models(models, options)
    served = Models(found, policy, metrics, {EMBEDDED_ALIAS: _EMBEDDED})  # as the other commands call that model
    if unknown := sorted({*options["preload"]} - served.slots.keys()):
        hint = f"There are: {', '.join(served.slots) or 'none; models of other servers are not loaded here'}."
        raise InvalidRequest(f"--preload names no model: '{unknown[0]}'.", hint=hint)
    app = application(served, rules, metrics, options["preload"])
    with _listen(options) as listening:

        def announce() -> None:
            click.echo(f"Serving {', '.join(found)} at {', '.join(listening.urls)}; press Ctrl-C to stop.")
            for name, each in found.items():
                if isinstance(each, RemoteModel) and each.sends_plain_key:
                    click.echo(f"warning: the key of '{name}' crosses the network as plain text; use https.", err=True)

        return _run(app, listening, announce, log_level)


def _run(app: Callable[..., Any], listening: _Listening, announce: Callable[[], None], log_level: str) -> int:
    """Serve an ASGI application until Ctrl-C. `announce` is called as soon as signals end the server in order."""
    import asyncio
    import logging

    from edgespec.server.connections import serve

    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=log_level.upper(), datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request of a download

    async def run() -> None:
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            hang_up = partial(os.kill, os.getpid(), signal.SIGTERM)  # a closed terminal is told to clients as well
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
        announce()
        await serve(app, listening.sockets, listening.tls)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:  # raised again by uvicorn after its shutdown
        return INTERRUPTED
    return 0


def read_models(models: tuple[str, ...], options: dict[str, Any]) -> dict[str, LocalModel | RemoteModel]:
    """The models, by the names that clients use: those of the file and those named.

    Raises what the first request for a model would, if that is known now: a name or a file that is not there.
    """
    from edgespec.models.target import check_target
    from edgespec.server.models import LocalModel

    registry, hub = open_hub()
    found = read_config(options["config"]) if options["config"] is not None else {}
    for text in models or (() if found else (registry.default,)):
        name, reference = _split_name(text)
        if not name or not reference or name in found:
            is_whole = name and reference
            message = f"two models have the name '{name}'." if is_whole else f"'{text}' lacks a name or a model."
            raise InvalidRequest(message, hint="Name each model: edgespec serve NAME=REF.")
        found[name] = LocalModel(load_config(reference, options))
    for name, each in found.items():
        if isinstance(each, LocalModel):  # for the tables too
            facts = check_target(each.config, registry, hub)
            found[name] = each._replace(config=_limit_memory(each.config, options), facts=facts)
    return found


def _split_name(text: str) -> tuple[str, str]:
    """The parts of NAME=REF. A path, which may contain "=", has the name of its file."""
    from edgespec.models.references import PATH_STARTS

    name, equals, reference = text.partition("=")
    is_path = text.startswith(PATH_STARTS) or os.path.exists(text)
    return (name, reference) if equals and not is_path else (_public_name(text), text)


def _limit_memory(config: LoadConfig, options: dict[str, Any]) -> LoadConfig:
    """`config`, which keeps no more than the options of the server allow."""
    if options["memory"] is False or config.memory is None:
        return replace(config, memory=None)
    return replace(
        config, memory=replace(config.memory, keeps_caches=config.memory.keeps_caches and options["slot_cache"])
    )


def _public_name(reference: str) -> str:
    """The name that clients use: for a file, its name without the folder, so that clients see no local path."""
    from edgespec.models.registry import EMBEDDED_ALIAS

    if reference == EMBEDDED_ALIAS:
        return _EMBEDDED
    path = PurePath(reference)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_absolute() or reference.startswith((".", "~")) else reference
