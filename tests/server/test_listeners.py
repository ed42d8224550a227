"""Unix sockets, several addresses, TLS."""

from __future__ import annotations

import socket
import ssl
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from edgespec.errors import InvalidRequest
from edgespec.server.connections import listen_unix, load_certificate
from tests.server.serving import PROMPT, TOY, serving
from tests.server.test_commands import run

DESCRIPTORS = 128  # of which 32 are for connections, 16 of them for one address
CERTIFICATES = Path(__file__).with_name("certificates")
VALID, VALID_KEY = CERTIFICATES / "valid.pem", CERTIFICATES / "valid.key.pem"
EXPIRED, EXPIRED_KEY = CERTIFICATES / "expired.pem", CERTIFICATES / "expired.key.pem"


def test_tls_two_ports_and_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # left by a server that was killed
    arguments = (*TOY, "--port", "0", "--unix", str(path), "--tls-cert", str(VALID), "--tls-key", str(VALID_KEY))
    with serving(tmp_path, *arguments) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        first, second, third = server.urls
        assert first.startswith("https://") and third == f"unix:{path}"
        trusts = ssl.create_default_context(cafile=VALID)
        for url in (first, second):
            with httpx.Client(verify=trusts) as http, openai.OpenAI(base_url=url, api_key="x", http_client=http) as it:
                assert it.completions.create(model="tree", prompt=PROMPT, max_tokens=3).usage
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{first}/models")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.host") as local:
            assert local.get("/v1/models").json()["data"][0]["id"] == "tree"
            assert local.post("/models/unload", json={"model": "tree"}).status_code == 200
        taken = run("serve", "--unix", str(path))
        assert taken.returncode == 2 and "another program listens there" in taken.stderr
    assert server.process.returncode == 0 and not path.exists()


def test_handshakes_count_as_connections(tmp_path: Path) -> None:
    """Clients that send nothing are refused from the 17th on; others get answers, whatever they send at once."""
    tls = ("--tls-cert", str(VALID), "--tls-key", str(VALID_KEY))
    with serving(tmp_path, *TOY, *tls, descriptors=DESCRIPTORS) as server, ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        assert b"200 OK" in call_at_once(address, "127.0.0.1")
        silent = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(17)]
        assert silent[16].recv(1) == b""
        if sys.platform == "linux":  # has all of 127/8
            assert b"200 OK" in call_at_once(address, "127.0.0.2")
        silent[0].sendall(b"GET /health HTTP/1.1\r\n\r\n")  # not TLS
        while silent[0].recv(1000):
            pass
        assert not server.log


def call_at_once(address: tuple[str, int], source: str) -> bytes:
    """The beginning of the answer to a request that is sent together with the end of the handshake."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(VALID)).wrap_bio(received, sent, server_hostname="127.0.0.1")
    with socket.create_connection(address, 30, (source, 0)) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(sent.read())
                received.write(connection.recv(100_000))
        client.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.sendall(sent.read())
        while True:
            try:
                return client.read(1000)
            except ssl.SSLWantReadError:
                received.write(connection.recv(100_000))


def test_a_unix_socket_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(tmp_path, *TOY, "--unix", str(path), port=None) as server:
        assert server.urls == [f"unix:{path}"]
        done = run("ps", "--url", server.urls[0])
        assert done.stdout.splitlines()[1].startswith("tree ")
        assert "do not call Unix sockets" in run("launch", "llm", "--url", server.urls[0]).stderr


@pytest.mark.parametrize(
    ("certificate", "key", "fault"),
    [
        (VALID, Path("/no/file"), "cannot read /no/file: No such file"),
        (VALID, EXPIRED_KEY, "is not the private key of"),
        (VALID_KEY, VALID, "are not a certificate and its private key in PEM format"),
        (EXPIRED, EXPIRED_KEY, "certificate has expired"),
    ],
)
def test_certificates_that_clients_would_refuse(certificate: Path, key: Path, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        load_certificate(certificate, key)


def test_what_cannot_be_listened_at(tmp_path: Path) -> None:
    faults = {
        Path(__file__): "there is a file that is not a socket",
        tmp_path / "folder" / "s": "No such file or directory",
        tmp_path / ("x" * 200): "too long",
    }
    for path, fault in faults.items():
        with pytest.raises(InvalidRequest, match=fault), listen_unix(path):
            pass


def test_a_certificate_needs_its_key() -> None:
    done = run("serve", "--port", "0", "--tls-cert", str(VALID))
    assert done.returncode == 2 and "TLS needs a certificate and its private key" in done.stderr and not done.stdout
