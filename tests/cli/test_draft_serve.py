"""`edgespec draft serve` and `--draft http://...`, as a user runs them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import COMMAND, Cli

PROMPT = "def read_lines(path):"
ARGUMENTS = ("run", PROMPT, "--no-memory", "--threads", "1", "--temperature", "0", "--max-tokens", "40")


@contextmanager
def serve(environment: dict[str, str], *arguments: str, **extra: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(the address, the process)"""
    command = [*COMMAND, "draft", "serve", "--threads", "1", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, env={**environment, **extra}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.fullmatch(r"Serving the draft (\S+) at (\S+); press Ctrl-C to stop\.\n", first)
        assert found and found[1] == "embedded-draft", first
        yield found[2], process
    finally:
        process.terminate()
        rest = process.communicate(timeout=30)[0]
    assert "Traceback" not in rest, rest


def test_it_drafts(cli: Cli, environment: dict[str, str]) -> None:
    plain = cli(*ARGUMENTS, "--draft", "none")
    with serve(environment) as (url, process):
        for draft in (url, f"ngram+{url}"):
            found = cli(*ARGUMENTS, "--draft", draft, "--draft-max", "3")
            assert found.stdout == plain.stdout and url in found.stderr
            assert re.search(r"[1-9]\d* of \d+ drafted tokens accepted", found.stderr), found.stderr
        process.terminate()
        assert process.wait(30) == 0


def test_keys_come_from_the_environment(cli: Cli, environment: dict[str, str]) -> None:
    with serve(environment, EDGESPEC_API_KEY="sesame") as (url, _):
        for key, told in (("", "wants a key"), ("wrong", "refuses this key")):
            refused = cli(*ARGUMENTS, "--draft", url, EDGESPEC_DRAFT_KEY=key)
            assert refused.returncode == 5 and told in refused.stderr and "EDGESPEC_DRAFT_KEY" in refused.stderr
        assert cli(*ARGUMENTS, "--draft", url, EDGESPEC_DRAFT_KEY="sesame").returncode == 0


def test_a_server_that_is_killed_costs_proposals_only(cli: Cli, environment: dict[str, str]) -> None:
    longer = (*ARGUMENTS[:-1], "600")
    plain = cli(*longer, "--draft", "none")
    with serve(environment) as (url, server):
        process = subprocess.Popen(
            [*COMMAND, *longer, "--draft", url, "--draft-max", "3"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        begun = process.stdout.read(20)
        server.kill()
        rest, errors = process.stdout.read(), process.stderr.read()
        process.wait(60)
    assert begun + rest == plain.stdout and process.returncode == 0
    assert f"The drafter remote has no drafts of {url}" in errors or "600 tokens" in errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("draft", "serve", "--host", "0.0.0.0"), "other machines could use a server at 0.0.0.0 without a key"),
        (("draft", "serve", "no-such-model"), "there is no model called 'no-such-model'"),
        (("draft", "serve", "x.gguf", "--for", "llama-8b-q4"), "REF and --for both name a draft"),
        (("draft", "serve", "--tls-cert", "x.pem"), "TLS needs a certificate and its private key"),
        ((*ARGUMENTS, "--draft", "http://127.0.0.1:1"), "Connection refused"),
        ((*ARGUMENTS, "--draft", "http://me:secret@box:1"), "an address is no place for a key"),
    ],
)
def test_what_is_refused_in_one_sentence(cli: Cli, arguments: tuple[str, ...], told: str) -> None:
    found = cli(*arguments)
    assert found.returncode and told.lower() in found.stderr.lower()
    assert "hint: " in found.stderr


def test_port_in_use(cli: Cli, environment: dict[str, str]) -> None:
    with serve(environment) as (url, _):
        found = cli("draft", "serve", "--port", url.rsplit(":", 1)[1])
        assert found.returncode == 2 and "Address already in use" in found.stderr


def test_it_ends_in_order_as_soon_as_it_says_that_it_serves(environment: dict[str, str]) -> None:
    with serve(environment) as (_, process):
        process.terminate()
        assert process.wait(30) == 0
