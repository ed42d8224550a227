"""`edgespec launch`: settings for other programs that use the server, as templates."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from edgespec.cli.server import UNIX, find_base, http_json, read_props, server_options
from edgespec.errors import InvalidRequest
from edgespec.folders import cache_folder

_ASSUMED_CONTEXT = 32_768
_LEAST_ANSWER = 2048  # tokens
_ANSWER_SHARE = 4  # a program should leave 1 / 4 of the context for an answer


class _Client(NamedTuple):
    """A program that can use the server.

    place          where its settings go
    settings       a template of Jinja. `any_key` is for a program that does not start without one
    tried          the version that the settings were tried with
    prompt_tokens  about the length of its first prompt, if it is known to be long
    """

    place: str
    settings: str
    tried: str
    prompt_tokens: int = 0


_AIDER = """\
mkdir -p {{ cache|quote }}
cat > {{ (cache + "/aider.model.metadata.json")|quote }} <<'END'
{
  {{ ("openai/" + model)|tojson }}: {
    "max_input_tokens": {{ context }},
    "max_tokens": {{ answer }},
    "max_output_tokens": {{ answer }},
    "input_cost_per_token": 0,
    "output_cost_per_token": 0,
    "litellm_provider": "openai",
    "mode": "chat"
  }
}
END
export OPENAI_API_BASE={{ v1|quote }}
export OPENAI_API_KEY={{ any_key|quote }}
aider --model {{ ("openai/" + model)|quote }} --model-metadata-file {{ (cache + "/aider.model.metadata.json")|quote }}
"""
_CLAUDE = """\
export ANTHROPIC_BASE_URL={{ url|quote }}
export ANTHROPIC_AUTH_TOKEN={{ any_key|quote }}
export ANTHROPIC_MODEL={{ model|quote }}
export ANTHROPIC_SMALL_FAST_MODEL={{ model|quote }}
export ANTHROPIC_DEFAULT_HAIKU_MODEL={{ model|quote }}
export CLAUDE_CODE_AUTO_COMPACT_WINDOW={{ context }}
export CLAUDE_CODE_MAX_OUTPUT_TOKENS={{ answer }}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
# Without its instructions on git and the status, which comes before the tools: each session would be read again.
export CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS=1
claude
"""
_CLINE = """\
cline auth -p openai-compatible -k {{ any_key|quote }} -m {{ model|quote }} -b {{ v1|quote }}
cline -P openai-compatible
"""
_CODEX = """\
model = {{ model|tojson }}
model_provider = "edgespec"
model_context_window = {{ context }}

[model_providers.edgespec]
name = "edgespec"
base_url = {{ v1|tojson }}
wire_api = "responses"
{% if key %}env_key = "EDGESPEC_API_KEY"
{% endif %}"""
_LLM = """\
[
  {
    "model_id": {{ ("edgespec-" + model)|tojson }},
    "model_name": {{ model|tojson }},
    "api_base": {{ v1|tojson }},
    "can_stream": true,
    "supports_schema": true,
    "supports_tools": true
  }
]
"""
_OPENCODE = """\
{
  "$schema": "https://opencode.ai/config.json",
  "provider": {
    "edgespec": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "edgespec",
      "options": {"baseURL": {{ v1|tojson }}{% if key %}, "apiKey": {{ key|tojson }}{% endif %}},
      "models": {
        {{ model|tojson }}: {
          "name": {{ model|tojson }},
          "tool_call": true,
          "limit": {"context": {{ context }}, "output": {{ answer }}}
        }
      }
    }
  },
  "model": {{ ("edgespec/" + model)|tojson }}
}
"""
_QWEN = """\
export OPENAI_BASE_URL={{ v1|quote }}
export OPENAI_API_KEY={{ any_key|quote }}
export OPENAI_MODEL={{ model|quote }}
qwen --auth-type openai
"""
_CLIENTS = {
    "aider": _Client("the shell; litellm, which aider uses, reads the file for the size of the context", _AIDER,
                     "0.86.2"),
    "claude": _Client("the shell", _CLAUDE, "2.1.197", 27_000),
    "cline": _Client("the shell; the first line is needed once", _CLINE, "3.0.65", 7_100),
    "codex": _Client("~/.codex/config.toml", _CODEX, "0.171.0", 9_000),
    "llm": _Client("extra-openai-models.yaml next to the file that `llm logs path` prints (YAML reads JSON)", _LLM,
                   "0.32.1"),
    "opencode": _Client("~/.config/opencode/opencode.json", _OPENCODE, "1.18.33", 7_700),
    "qwen": _Client("the shell", _QWEN, "0.15.10", 19_000),
}  # fmt: skip


@click.command("launch")
@click.argument("client", metavar="CLIENT", type=click.Choice(sorted(_CLIENTS)))
@click.option("--model", help="Model to use. [default: the server's first]")
@server_options
def launch_command(client: str, model: str | None, url: str, api_key: str | None) -> None:
    """Print the settings that make CLIENT use a running server.

    CLIENT is aider, claude, cline, codex, llm, opencode or qwen.
    """
    from jinja2 import Environment

    if url.startswith(UNIX):
        raise InvalidRequest("other programs do not call Unix sockets.", hint="Start the server with --port as well.")
    models = read_props(url, api_key)["models"]
    names = [each["name"] for each in models]
    if model is not None and model not in names:
        raise InvalidRequest(f"the server has no model '{model}'.", hint=f"It has: {', '.join(names)}.")
    chosen = models[names.index(model)] if model is not None else models[0]
    if not chosen["is_open"]:
        click.echo(f"# loading {chosen['name']}, to know its context", err=True)
        probe = {"model": chosen["name"], "messages": [{"role": "user", "content": "x"}]}
        http_json("POST", url, "/v1/messages/count_tokens", api_key, "input_tokens", probe, timeout_s=None)
        chosen = read_props(url, api_key)["models"][names.index(chosen["name"])]
    name, context = chosen["name"], chosen["context_size"]
    if context is None:  # of a model of another server that does not say
        context = _ASSUMED_CONTEXT
        click.echo(f"# the context of {name} is not known; {context:,} tokens are assumed", err=True)
    about, environment = _CLIENTS[client], Environment(keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    click.echo(f"# for {about.place}\n# these settings were tried with {client} {about.tried}", err=True)
    for line in _warn_of_context(client, about, chosen, context):
        click.echo(f"# {line}", err=True)
    if url.startswith("https:"):
        click.echo(
            "# for a certificate that the system does not know: export SSL_CERT_FILE=CERT for Python, "
            "NODE_EXTRA_CA_CERTS=CERT for Node",
            err=True,
        )
    base, keys = find_base(url), {"key": api_key, "any_key": api_key or "none"}
    sizes = {"context": context, "answer": context // _ANSWER_SHARE, "cache": str(cache_folder())}
    settings = environment.from_string(about.settings).render(url=base, v1=f"{base}/v1", model=name, **keys, **sizes)
    click.echo(settings, nl=False)


def _warn_of_context(client: str, about: _Client, model: dict[str, Any], context: int) -> Iterator[str]:
    """Say if the first prompt of a program and an answer do not fit in the context, and what would help."""
    needed = about.prompt_tokens + _LEAST_ANSWER if about.prompt_tokens else 0
    if needed <= context:
        return
    name, trained = model["name"], model.get("trained_context")
    first = f"{client}'s first prompt has about {about.prompt_tokens:,} tokens"
    if trained is not None and trained < needed:
        yield f"{first}; {name} was trained for {trained:,} and is too small for it: take a model with a longer context"
        return
    larger = 2 ** (2 * about.prompt_tokens - 1).bit_length()
    more = "restart the server with --ctx" if model["state"] != "remote" else "start the server behind it with"
    yield f"{first}, and the context of {name}, {context:,}, leaves no room for an answer: {more} {larger}"
