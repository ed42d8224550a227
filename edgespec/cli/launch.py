"""`edgespec launch`: settings for other programs that use the server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import click

from edgespec.cli.ps import http_json, server_options


@dataclass(frozen=True, slots=True)
class _Server:
    url: str  # without /v1
    model: str
    key: str
    context_size: int

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def _format_exports(**values: str) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _format_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _configure_aider(server: _Server) -> tuple[str, str]:
    run = f"aider --model {shlex.quote(f'openai/{server.model}')}\n"
    return "the shell", _format_exports(OPENAI_API_BASE=server.v1, OPENAI_API_KEY=server.key) + run


def _configure_claude(server: _Server) -> tuple[str, str]:
    variables = _format_exports(
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN=server.key,
        ANTHROPIC_MODEL=server.model,
        ANTHROPIC_SMALL_FAST_MODEL=server.model,
    )
    return "the shell", variables + "claude\n"


def _configure_codex(server: _Server) -> tuple[str, str]:
    quoted = json.dumps
    return "~/.codex/config.toml", (
        f'model = {quoted(server.model)}\nmodel_provider = "edgespec"\nmodel_context_window = {server.context_size}\n\n'
        f'[model_providers.edgespec]\nname = "edgespec"\nbase_url = {quoted(server.v1)}\nwire_api = "responses"\n'
        'env_key = "EDGESPEC_API_KEY"\n'
    )


def _configure_continue(server: _Server) -> tuple[str, str]:
    model = {
        "name": f"edgespec {server.model}",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.v1,
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply"],
    }
    config = {"name": "edgespec", "version": "1.0.0", "schema": "v1", "models": [model]}
    return "~/.continue/config.yaml (YAML reads JSON)", _format_json(config)


def _configure_llm(server: _Server) -> tuple[str, str]:
    model = {
        "model_id": f"edgespec-{server.model}",
        "model_name": server.model,
        "api_base": server.v1,
        "can_stream": True,
    }
    return "extra-openai-models.yaml next to the file that `llm logs path` prints (YAML reads JSON)", _format_json(
        [model]
    )


def _configure_opencode(server: _Server) -> tuple[str, str]:
    limit = {"context": server.context_size, "output": server.context_size // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgespec",
        "options": {"baseURL": server.v1, "apiKey": server.key},
        "models": {server.model: {"name": server.model, "tool_call": True, "limit": limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"edgespec": provider},
        "model": f"edgespec/{server.model}",
    }
    return "~/.config/opencode/opencode.json", _format_json(config)


def _configure_open_webui(server: _Server) -> tuple[str, str]:
    return "the shell", _format_exports(OPENAI_API_BASE_URL=server.v1, OPENAI_API_KEY=server.key) + "open-webui serve\n"


def _configure_zed(server: _Server) -> tuple[str, str]:
    capabilities = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    model = {"name": server.model, "max_tokens": server.context_size, "capabilities": capabilities}
    compatible = {"edgespec": {"api_url": server.v1, "available_models": [model]}}
    return "Zed's settings.json (the key goes into EDGESPEC_API_KEY)", _format_json(
        {"language_models": {"openai_compatible": compatible}}
    )


_CLIENTS: dict[str, Callable[[_Server], tuple[str, str]]] = {
    "aider": _configure_aider,
    "claude": _configure_claude,
    "codex": _configure_codex,
    "continue": _configure_continue,
    "llm": _configure_llm,
    "open-webui": _configure_open_webui,
    "opencode": _configure_opencode,
    "zed": _configure_zed,
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

    models = http_json("GET", url, "/props", api_key)["models"]
    names = [each["name"] for each in models]
    if model is not None and model not in names:
        raise InvalidRequest(f"the server has no model '{model}'.", hint=f"It has: {', '.join(names)}.")
    chosen = models[names.index(model)] if model is not None else models[0]
    place, text = _CLIENTS[client](
        _Server(url.rstrip("/"), chosen["name"], api_key or "none", chosen.get("context_size") or 8192)
    )
    click.echo(f"# for {place}", err=True)
    click.echo(text, nl=False)
