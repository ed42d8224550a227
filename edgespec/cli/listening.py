"""The options of `edgespec serve` that say where it listens and who may call, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from edgespec.cli.options import rare_option

if TYPE_CHECKING:
    import socket
    import ssl

    from edgespec.server.guard import Rules
    from edgespec.server.keys import Keys

F = TypeVar("F", bound=Callable[..., Any])

HOST = "127.0.0.1"
PORT = 7437
DRAFT_PORT = 7438
_FILE = click.Path(path_type=Path)
_OPTIONS = (
    click.option(
        "--host", "hosts", multiple=True, metavar="HOST",
        help=f"Address to listen on; repeatable.  [default: {HOST}]",
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


_DRAFT_PORT = click.option(
    "--port", "ports", multiple=True, type=click.IntRange(0, 65535), metavar="PORT", default=[DRAFT_PORT],
    show_default=True, help="Port to listen on; repeatable. 0 takes a free one.",
)  # fmt: skip


def listening_options(command: F) -> F:
    """Add the options, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def draft_listening_options(command: F) -> F:
    """Add those of a draft server, which no browser calls, and another default port."""
    host, _, _, *rest, _ = _OPTIONS
    for option in reversed((host, _DRAFT_PORT, *rest)):
        command = option(command)
    return command


class Listening(NamedTuple):
    """Where a server listens: its sockets, TLS for those that are not Unix sockets, and its URLs."""

    sockets: Sequence[socket.socket]
    tls: ssl.SSLContext | None
    urls: Sequence[str]


@contextmanager
def listen(options: dict[str, Any]) -> Iterator[Listening]:
    """Listen as the options say. Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest
    from edgespec.server.listeners import listen_tcp, listen_unix
    from edgespec.server.tls import load_certificate

    certificate, key, unix = options["tls_cert"], options["tls_key"], options["unix"]
    if (certificate is None) != (key is None):
        raise InvalidRequest("TLS needs a certificate and its private key.", hint="Give --tls-cert and --tls-key.")
    tls = load_certificate(certificate, key) if certificate is not None else None
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
        yield Listening(sockets, tls, urls)


def _get_hosts(options: dict[str, Any]) -> tuple[str, ...]:
    if options["hosts"]:
        return tuple(dict.fromkeys(options["hosts"]))
    return () if options["unix"] is not None and not options["ports"] else (HOST,)


def access_rules(options: dict[str, Any]) -> Rules:
    """The hosts, origins and keys that the server accepts. Raises InvalidRequest."""
    from edgespec.errors import InvalidRequest
    from edgespec.server.guard import LOOPBACK, Rules

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


def _read_keys(options: dict[str, Any]) -> Keys | None:
    """The keys of --api-key and of the file; None without both."""
    from edgespec.server.key_file import KeyFile
    from edgespec.server.keys import ONLY_KEY, Caller, Key, Keys, hash_key

    path, text = options["key_file"], options["api_key"]
    fixed = [Key(Caller(ONLY_KEY, may_manage=True, remembers=bool(options["memory"])), hash_key(text))] if text else []
    if path is None:
        return Keys(lambda: fixed) if fixed else None
    file = KeyFile(path)
    return Keys(lambda: (*fixed, *file.read()))


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
