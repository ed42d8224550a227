"""Clients and the proxies that the environment names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from edgespec.models.hub_errors import HubContext, HubUnreachable, map_errors
from edgespec.proxies import ProxyUnusable, is_on_this_machine, open_client

NOBODY = "http://127.0.0.1:9"  # the port of the discard protocol, where nothing listens
VARIABLES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Keep the output of the tests clean."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """That of a server on this machine, in an environment without proxies."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", [NOBODY, NOBODY.replace("http", "socks5"), "nothing://x"])
def test_a_server_on_this_machine_is_asked_without_the_proxy(
    port: int, variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    for host in ("127.0.0.1", "localhost"):
        with open_client(httpx.Client, f"http://{host}:{port}", timeout=10) as client:
            assert client.get(f"http://{host}:{port}/").status_code == 204


@pytest.mark.parametrize("proxy", [NOBODY, NOBODY.replace("http", "socks5")])
def test_other_servers_are_asked_through_the_proxy(port: int, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at the proxy, so the answer that the server would give is missing."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    url = f"http://192.0.2.1:{port}"
    with open_client(httpx.Client, url, timeout=10) as client, pytest.raises((httpx.ConnectError, httpx.ProxyError)):
        client.get(url)


def test_a_proxy_of_no_kind_is_one_sentence(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nothing://x")
    with pytest.raises(ProxyUnusable, match="the proxy of the environment cannot be used") as told:
        open_client(httpx.AsyncClient, "https://example.org/v1")
    assert "ALL_PROXY" in told.value.hint and told.value.exit_code == 4


def test_the_hub_counts_as_unreachable_behind_such_a_proxy(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nothing://x")
    with (
        pytest.raises(HubUnreachable, match="cannot be used"),
        map_errors(HubContext("https://example.org", "", "a/b")),
    ):
        httpx.Client()  # as the hub's client opens its session


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.10", "[::1]"])
def test_loopback_addresses_are_this_machine(host: str) -> None:
    assert is_on_this_machine(f"http://{host}:8080/v1")


@pytest.mark.parametrize(
    "url", ["http://example.org", "http://10.0.0.1", "http://[fe80::1]", "http://[", "", "unix:/x"]
)
def test_other_addresses_are_not(url: str) -> None:
    assert not is_on_this_machine(url)
