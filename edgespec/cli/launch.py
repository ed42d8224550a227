"""`edgespec launch`: the settings with which other programs use a server of ours."""

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


def _exports(**values: str) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _aider(at: _Server) -> tuple[str, str]:
    run = f"aider --model {shlex.quote(f'openai/{at.model}')}\n"
    return "the shell", _exports(OPENAI_API_BASE=at.v1, OPENAI_API_KEY=at.key) + run


def _claude(at: _Server) -> tuple[str, str]:
    variables = _exports(ANTHROPIC_BASE_URL=at.url, ANTHROPIC_AUTH_TOKEN=at.key, ANTHROPIC_MODEL=at.model,
                         ANTHROPIC_SMALL_FAST_MODEL=at.model)  # fmt: skip
    return "the shell", variables + "claude\n"


def _codex(at: _Server) -> tuple[str, str]:
    quoted = json.dumps
    return "~/.codex/config.toml", (
        f'model = {quoted(at.model)}\nmodel_provider = "edgespec"\nmodel_context_window = {at.context_size}\n\n'
        f'[model_providers.edgespec]\nname = "edgespec"\nbase_url = {quoted(at.v1)}\nwire_api = "responses"\n'
        'env_key = "EDGESPEC_API_KEY"\n'
    )


def _continue(at: _Server) -> tuple[str, str]:
    model = {"name": f"edgespec {at.model}", "provider": "openai", "model": at.model, "apiBase": at.v1,
             "apiKey": at.key, "roles": ["chat", "edit", "apply"]}  # fmt: skip
    config = {"name": "edgespec", "version": "1.0.0", "schema": "v1", "models": [model]}
    return "~/.continue/config.yaml (YAML reads JSON)", _json(config)


def _llm(at: _Server) -> tuple[str, str]:
    model = {"model_id": f"edgespec-{at.model}", "model_name": at.model, "api_base": at.v1, "can_stream": True}
    return "extra-openai-models.yaml beside `llm logs path` (YAML reads JSON)", _json([model])


def _opencode(at: _Server) -> tuple[str, str]:
    limit = {"context": at.context_size, "output": at.context_size // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgespec",
        "options": {"baseURL": at.v1, "apiKey": at.key},
        "models": {at.model: {"name": at.model, "tool_call": True, "limit": limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"edgespec": provider},
        "model": f"edgespec/{at.model}",
    }
    return "~/.config/opencode/opencode.json", _json(config)


def _open_webui(at: _Server) -> tuple[str, str]:
    return "the shell", _exports(OPENAI_API_BASE_URL=at.v1, OPENAI_API_KEY=at.key) + "open-webui serve\n"


def _zed(at: _Server) -> tuple[str, str]:
    able = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    model = {"name": at.model, "max_tokens": at.context_size, "capabilities": able}
    compatible = {"edgespec": {"api_url": at.v1, "available_models": [model]}}
    return "Zed's settings.json (the key goes into EDGESPEC_API_KEY)", _json(
        {"language_models": {"openai_compatible": compatible}}
    )


_CLIENTS: dict[str, Callable[[_Server], tuple[str, str]]] = {
    "aider": _aider,
    "claude": _claude,
    "codex": _codex,
    "continue": _continue,
    "llm": _llm,
    "open-webui": _open_webui,
    "opencode": _opencode,
    "zed": _zed,
}


@click.command("launch")
@click.argument("client", type=click.Choice(sorted(_CLIENTS)))
@click.option("--model", help="Which of the server's models. [default: its first]")
@server_options
def launch_command(client: str, model: str | None, url: str, api_key: str | None) -> None:
    """Print the settings with which CLIENT uses the server that is running."""
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
