"""Unix sockets, several addresses, TLS, and connections that send nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from edgespec.errors import InvalidRequest
from edgespec.server import connections
from edgespec.server.connections import Connection, HttpServer, listen_tcp, listen_unix, load_certificate
from tests.server.serving import PROMPT, TOY, serving
from tests.server.test_launch import run

CERTIFICATES = Path(__file__).with_name("certificates")
VALID, VALID_KEY = CERTIFICATES / "valid.pem", CERTIFICATES / "valid.key.pem"
EXPIRED_KEY = CERTIFICATES / "expired.key.pem"


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


def test_a_unix_socket_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(tmp_path, *TOY, "--unix", str(path), port=None) as server:
        assert server.urls == [f"unix:{path}"]
        done = run("ps", "--url", server.urls[0])
        assert done.stdout.splitlines()[1].startswith("tree ")
        assert "do not call Unix sockets" in run("launch", "llm", "--url", server.urls[0]).stderr


def test_what_cannot_be_listened_at(tmp_path: Path) -> None:
    faults = {
        Path(__file__): "Address already in use",
        tmp_path / "folder" / "s": "No such file or directory",
        tmp_path / ("x" * 200): "too long",
    }
    for path, fault in faults.items():
        with pytest.raises(InvalidRequest, match=fault), listen_unix(path):
            pass


def test_a_certificate_needs_its_key() -> None:
    done = run("serve", "--port", "0", "--tls-cert", str(VALID))
    assert done.returncode == 2 and "TLS needs a certificate and its private key" in done.stderr and not done.stdout


def test_certificates_that_cannot_be_used() -> None:
    for certificate, key in ((VALID, Path("/no/file")), (VALID, EXPIRED_KEY), (VALID_KEY, VALID)):
        with pytest.raises(InvalidRequest, match=f"cannot use {certificate} and {key}: "):
            load_certificate(certificate, key)


def test_a_connection_without_a_whole_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_TIMEOUT_S", 0.2)

    async def run() -> None:
        server = HttpServer(uvicorn.Config(Starlette(), http=Connection, log_config=None), None)
        with listen_tcp("127.0.0.1", 0) as listener:
            task = asyncio.create_task(server.serve([listener]))
            for begun in (b"", b"GET / HTTP/1.1\r\nhost: local"):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(begun)
                assert await asyncio.wait_for(reader.read(), 30) == b""
                writer.close()
            server.should_exit = True
            await task

    asyncio.run(run())
