"""`edgespec launch`: settings for other programs that use the server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import click

from edgespec.cli.ps import http_json, server_options

_VERSION_TIMEOUT_S = 10.0
_ASSUMED_CONTEXT = 32_768


@dataclass(frozen=True, slots=True)
class _Server:
    """The model that a program is to use.

    url         without /v1
    any_key     the key, or one that the server ignores, for a program that does not start without one
    max_answer  tokens that a program should leave for an answer
    is_remote   whether another server has the model
    """

    url: str
    model: str
    key: str | None
    context_size: int
    is_remote: bool

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def any_key(self) -> str:
        return self.key or "none"

    @property
    def max_answer(self) -> int:
        return self.context_size // 4


class _Client(NamedTuple):
    """A program that can use the server.

    place          where its settings go
    command        tells its version; "" for a program without one
    tried          the version that the settings were tried with; None where they follow its documentation alone
    prompt_tokens  about the length of its first prompt, where it is known to be long
    """

    place: str
    command: str = ""
    tried: str | None = None
    prompt_tokens: int = 0


_CLIENTS = {
    "aider": _Client("the shell; litellm, which aider uses, reads the file for the size of the context", "aider",
                     "0.86.2"),
    "claude": _Client("the shell", "claude", "2.1.197", 27_000),
    "codex": _Client("~/.codex/config.toml", "codex", "0.169.0"),
    "continue": _Client("~/.continue/config.yaml (YAML reads JSON)"),
    "llm": _Client("extra-openai-models.yaml next to the file that `llm logs path` prints (YAML reads JSON)", "llm",
                   "0.32.1"),
    "open-webui": _Client("the shell"),
    "opencode": _Client("~/.config/opencode/opencode.json", "opencode", "1.18.33"),
    "zed": _Client("Zed's settings.json; Zed asks for a key, or reads EDGESPEC_API_KEY: the server's, or any text",
                   "zed"),
}  # fmt: skip


def _format_exports(**values: str) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _format_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _format_texts(server: _Server) -> dict[str, str]:
    """The settings of the programs that a shell starts, and of codex."""
    name = f"openai/{server.model}"
    metadata = {
        "max_input_tokens": server.context_size,
        "max_tokens": server.max_answer,
        "max_output_tokens": server.max_answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    key = 'env_key = "EDGESPEC_API_KEY"\n' if server.key else ""
    return {
        "aider": f"cat > edgespec.model.metadata.json <<'END'\n{_format_json({name: metadata})}END\n"
        + _format_exports(OPENAI_API_BASE=server.v1, OPENAI_API_KEY=server.any_key)
        + f"aider --model {shlex.quote(name)} --model-metadata-file edgespec.model.metadata.json\n",
        "claude": _format_exports(
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_AUTH_TOKEN=server.any_key,
            ANTHROPIC_MODEL=server.model,
            ANTHROPIC_SMALL_FAST_MODEL=server.model,
            ANTHROPIC_DEFAULT_HAIKU_MODEL=server.model,
            CLAUDE_CODE_AUTO_COMPACT_WINDOW=str(server.context_size),
            CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(server.max_answer),
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            # Its prompt begins with a line of the conversation's own, so that conversations would share no cache.
            CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        )
        + "claude\n",
        "codex": (
            f'model = {json.dumps(server.model)}\nmodel_provider = "edgespec"\n'
            f"model_context_window = {server.context_size}\n\n"
            f'[model_providers.edgespec]\nname = "edgespec"\nbase_url = {json.dumps(server.v1)}\n'
            f'wire_api = "responses"\n{key}'
        ),
        "open-webui": _format_exports(OPENAI_API_BASE_URL=server.v1, OPENAI_API_KEY=server.any_key)
        + "open-webui serve\n",
    }


def _list_objects(server: _Server) -> dict[str, object]:
    """The settings of the programs that read JSON."""
    continue_model = {
        "name": f"edgespec {server.model}",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.v1,
        **({"apiKey": server.key} if server.key else {}),
        "defaultCompletionOptions": {"contextLength": server.context_size, "maxTokens": server.max_answer},
        "roles": ["chat", "edit", "apply"],
    }
    opencode_limit = {"context": server.context_size, "output": server.max_answer}
    opencode = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgespec",
        "options": {"baseURL": server.v1, **({"apiKey": server.key} if server.key else {})},
        "models": {server.model: {"name": server.model, "tool_call": True, "limit": opencode_limit}},
    }
    zed_model = {
        "name": server.model,
        "max_tokens": server.context_size,
        "max_output_tokens": server.max_answer,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    zed = {"edgespec": {"api_url": server.v1, "available_models": [zed_model]}}
    return {
        "continue": {"name": "edgespec", "version": "1.0.0", "schema": "v1", "models": [continue_model]},
        "llm": [
            {
                "model_id": f"edgespec-{server.model}",
                "model_name": server.model,
                "api_base": server.v1,
                "can_stream": True,
            }
        ],
        "opencode": {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"edgespec": opencode},
            "model": f"edgespec/{server.model}",
        },
        "zed": {"language_models": {"openai_compatible": zed}},
    }


@click.command("launch")
@click.argument("client", metavar="CLIENT", type=click.Choice(sorted(_CLIENTS)))
@click.option("--model", help="Model to use. [default: the server's first]")
@server_options
def launch_command(client: str, model: str | None, url: str, api_key: str | None) -> None:
    """Print the settings that make CLIENT use a running server.

    CLIENT is aider, claude, codex, continue, llm, open-webui, opencode or zed.
    """
    from edgespec.errors import InvalidRequest

    if url.startswith("unix:"):
        raise InvalidRequest("other programs do not call Unix sockets.", hint="Start the server with --port as well.")
    models = http_json("GET", url, "/props", api_key)["models"]
    names = [each["name"] for each in models]
    if model is not None and model not in names:
        raise InvalidRequest(f"the server has no model '{model}'.", hint=f"It has: {', '.join(names)}.")
    chosen = models[names.index(model)] if model is not None else models[0]
    if not chosen["is_open"]:
        click.echo(f"# loading {chosen['name']}, to know its context", err=True)
        probe = {"model": chosen["name"], "messages": [{"role": "user", "content": "x"}]}
        http_json("POST", url, "/v1/messages/count_tokens", api_key, probe, timeout_s=None)
        chosen = http_json("GET", url, "/props", api_key)["models"][names.index(chosen["name"])]
    context_size = chosen["context_size"]
    if context_size is None:  # of a model of another server that does not say
        context_size = _ASSUMED_CONTEXT
        click.echo(f"# the context of {chosen['name']} is not known; {context_size:,} tokens are assumed", err=True)
    server = _Server(url.rstrip("/"), chosen["name"], api_key, context_size, chosen["state"] == "remote")
    about, texts = _CLIENTS[client], _format_texts(server)
    for line in (f"for {about.place}", *_describe_fit(client, about, server)):
        click.echo(f"# {line}", err=True)
    click.echo(texts[client] if client in texts else _format_json(_list_objects(server)[client]), nl=False)


def _describe_fit(name: str, client: _Client, server: _Server) -> Iterator[str]:
    """Which version is installed and which one was tried, and a warning where the first prompt does not fit."""
    if client.command:
        tried = f"tried with {client.tried}" if client.tried else "written from its documentation and not tried with it"
        installed = _read_version(client.command)
        found = f"{name} {installed} is installed" if installed else f"{name} is not installed"
        yield f"{found}; these settings were {tried}"
    if client.prompt_tokens > server.context_size:
        larger = 2 ** (client.prompt_tokens * 2 - 1).bit_length()
        place = "the server behind it with more" if server.is_remote else f"the server with --ctx {larger}"
        yield (
            f"{name}'s first prompt has about {client.prompt_tokens:,} tokens, but the context of {server.model} holds "
            f"{server.context_size:,}: {'start' if server.is_remote else 'restart'} {place}"
        )


def _read_version(command: str) -> str | None:
    """The version that `command --version` prints, "?" if it prints none; None where it is not installed."""
    path = shutil.which(command)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    found = re.search(r"\d+(\.\d+)+[\w.+-]*", done.stdout)
    return found[0] if found else "?"
