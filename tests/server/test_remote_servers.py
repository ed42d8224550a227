"""Models of other servers: one that is killed, this very server, certificates, keys and queues."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.server.serving import ENDLESS, KEY, TOY, Server, serving
from tests.server.test_listeners import VALID, VALID_KEY
from tests.server.test_remote import MESSAGES, front, remote


def test_a_server_that_is_killed_amid_answers_comes_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    table = remote(f"http://127.0.0.1:{port}", model="tree", parallel=4)
    with front(tmp_path / "front", {"far": table}) as server:
        assert "cannot be reached" in server.ask("far").json()["error"]["message"]
        (tmp_path / "back").mkdir()
        with pytest.raises(AssertionError), serving(tmp_path / "back", *TOY, port=port) as back:
            asked: Any = {"model": "far", "messages": MESSAGES, "stream": True, "max_tokens": 150_000}
            asked["temperature"] = 0
            openai_stream = server.openai().chat.completions.create(**asked, logit_bias={"256": -100})
            next(openai_stream)
            begun = threading.Event()

            def read() -> None:
                for _ in server.anthropic().messages.create(**asked):
                    begun.set()

            with ThreadPoolExecutor(1) as pool:
                reader = pool.submit(read)
                assert begun.wait(30)
                server.until("far", answering=2)
                back.process.kill()
                for engine in back.engines():
                    engine.kill()
                told = "the server behind 'far' ended the"
                with pytest.raises(openai.APIError, match=told):
                    list(openai_stream)
                with pytest.raises(anthropic.APIError, match=told):
                    reader.result(60)
            assert "cannot be reached" in server.ask("far").json()["error"]["message"]
            raise AssertionError
        (tmp_path / "again").mkdir()
        with serving(tmp_path / "again", *TOY, port=port):
            assert server.ask("far", max_tokens=3).status_code == 200
            assert server.model("far")["is_reachable"] and server.model("far")["last_error"] is None


def test_a_url_that_leads_back_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [each.getsockname()[1] for each in (one, two)]
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    tables = {"self": remote(urls[0]), "round": remote(urls[1])}
    with (
        front(tmp_path / "one", tables, port=ports[0]) as first,
        front(tmp_path / "two", {"round": remote(urls[0])}, port=ports[1]),
    ):
        for name in tables:
            response = first.ask(name)
            assert response.status_code == 508
            assert f"the url of '{name}' leads back to this server" in response.json()["error"]["message"]
        message = first.post("/v1/messages", json={"model": "self", "max_tokens": 3, "messages": MESSAGES}).json()
        assert message["type"] == "error" and "leads back" in message["error"]["message"]


def test_certificates_and_names(tmp_path: Path) -> None:
    """A certificate that is not trusted, one that is, a name that is not known, and a key without TLS."""
    (tmp_path / "back").mkdir()
    with serving(tmp_path / "back", *TOY, "--tls-cert", str(VALID), "--tls-key", str(VALID_KEY)) as back:
        tables = {
            "far": remote(f"{back.url}/v1", model="tree"),
            "misnamed": remote("http://box.invalid/v1", key_env="FAR_KEY"),
        }
        with front(tmp_path / "no", tables, FAR_KEY="sk-secret", NO_PROXY="*") as server:
            told = server.ask("far").json()["error"]["message"]
            assert told.startswith(
                "the server behind 'far' has a certificate that is not trusted (self-signed certificate"
            )
            told = server.ask("misnamed").json()["error"]["message"]
            assert "cannot be reached (its name is not known)" in told and "invalid" not in told
            assert any("the key of 'misnamed' crosses the network as plain text" in line for line in server.log)
        with front(tmp_path / "yes", {"far": tables["far"]}, SSL_CERT_FILE=str(VALID)) as server:
            assert server.ask("far", max_tokens=3).status_code == 200
            assert not any("plain text" in line for line in server.log)


def test_keys_and_the_queue_of_this_server(tmp_path: Path, toy: Server) -> None:
    table = remote(toy.url, model="tree", parallel=1)
    with front(tmp_path, {"far": table}, "--api-key", KEY, "--queue", "0") as server:
        assert server.ask("far").status_code == 401
        client = server.openai()
        asked: Any = {"model": "far", "messages": MESSAGES, "stream": True, **ENDLESS}
        stream = client.chat.completions.create(**asked)
        next(stream)
        with pytest.raises(openai.RateLimitError, match="requests are waiting"):
            client.chat.completions.create(**asked)
        stream.close()
