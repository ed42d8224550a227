"""The commands around a server: `edgespec ps`, `stop`, `launch`, `key` and `service`."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from edgespec.cli.options import add_options, json_option
from edgespec.cli.serve import PORT, read_models, serve_command
from edgespec.cli.terminal import format_speed, format_table, print_result
from edgespec.errors import HubError, InvalidRequest, UnknownModel, reason_of
from edgespec.proxies import open_client
from edgespec.units import count, gib

_TIMEOUT_S = 30.0
_UNIX = "unix:"
_MINUTES_S = 120  # from which on times are in minutes


server_options = add_options(
    click.option("--url", default=f"http://127.0.0.1:{PORT}", help="URL of the server, or unix:PATH."),
    click.option("--api-key", envvar="EDGESPEC_API_KEY", help="The server's key. [env: EDGESPEC_API_KEY]"),
)


@click.command("ps")
@json_option
@server_options
def ps_command(as_json: bool, url: str, api_key: str | None) -> None:
    """List the models of a running server."""
    props = read_props(url, api_key)
    print_result(props, _format(props), as_json=as_json)


def _format(props: dict[str, Any]) -> Iterator[str]:
    rows = [("MODEL", "STATE", "RUNTIME", "DRAFT", "MEMORY", "WAITING", "UNLOADS")]
    for model in props["models"]:
        memory = gib(model["resident_bytes"]) if model["is_open"] and model["state"] != "remote" else ""
        about = (model.get("backend", ""), model.get("draft", ""), memory, str(model["waiting"]))
        rows.append((model["name"], _describe_state(model), *about, _describe_unload(model)))
    yield from format_table(rows)
    for model in props["models"]:
        for line in _describe_more(model, [each for each in props["recent"] if each["model"] == model["name"]]):
            yield f"{model['name']}: {line}"


def _describe_more(model: dict[str, Any], calls: list[dict[str, Any]]) -> Iterator[str]:
    """The speed of the last answers, the acceptance of the drafters, and the last error."""
    timed = [each for each in calls if each["tpot"] and each["step_p99"]]
    if timed:
        tpot_s, p99_s = (median(each[name] for each in timed) for name in ("tpot", "step_p99"))
        yield f"{format_speed(tpot_s, p99_s)}, median of {count(len(timed), 'answer')}"
    if (sizes := model.get("estimated_bytes")) is not None:
        yield (
            f"{gib(sizes['weights'])} of weights, {gib(sizes['kv'])} of KV cache, {gib(sizes['scratch'])} of scratch"
            f" memory, {gib(sizes['draft'])} of drafts; one more slot, of {model['context_size']:,} tokens,"
            f" takes {gib(sizes['slot'])}, and 8,192 tokens more of context {gib(sizes['context_8192'])}"
        )
    for drafter in model.get("drafters", ()):
        yield (
            f"drafts of {drafter['label']} are accepted {drafter['acceptance']:.0%} of the time over"
            f" {count(drafter['answers'], 'answer')}, {drafter['recent_acceptance']:.0%} in the last ones"
        )
    if losses := [each["read_again"] for each in calls if each["read_again"]]:
        yield losses[0]
    if model.get("last_error"):
        yield model["last_error"]


def _describe_state(model: dict[str, Any]) -> str:
    if model["is_stalled"]:
        return f"silent for {model['silent_seconds']:.0f} s"
    if model["answering"]:
        return f"answering {model['answering']}"
    if model.get("is_reachable") is False:
        return "not reachable"
    return "fails" if model.get("last_error") else str(model["state"])


def _describe_unload(model: dict[str, Any]) -> str:
    """When a model is unloaded if nobody calls it."""
    if not model["is_open"] or model["state"] == "remote":
        return ""
    seconds = model["unloads_in_seconds"]
    return (
        "never" if seconds is None else f"in {seconds:.0f} s" if seconds < _MINUTES_S else f"in {seconds / 60:.0f} min"
    )


@click.command("stop")
@click.argument("model")
@click.option("--now", is_flag=True, help="End the model's process at once; its requests fail.")
@server_options
def stop_command(model: str, now: bool, url: str, api_key: str | None) -> None:
    """Unload MODEL from a running server once its requests are done; the next request loads it again."""
    body = {"model": model, "now": now}
    http_json("POST", url, "/models/unload", api_key, "success", body, timeout_s=None)
    click.echo(f"{model} is unloaded")


def read_props(url: str, api_key: str | None) -> dict[str, Any]:
    """The models of a server, and its last answers. Raises as `http_json` does."""
    return http_json("GET", url, "/props", api_key, "models")


def http_json(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    expected: str,
    body: dict[str, Any] | None = None,
    timeout_s: float | None = _TIMEOUT_S,
) -> dict[str, Any]:
    """Send a request and return the server's JSON response, which has the key `expected`.

    Raises HubError if no server answers, or one of another program; UnknownModel; InvalidRequest if the server rejects
    the request.
    """
    import httpx

    is_unix = url.startswith(_UNIX)
    base = "http://localhost" if is_unix else _find_base(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if is_unix:
            opened = httpx.Client(transport=httpx.HTTPTransport(uds=url.removeprefix(_UNIX)), timeout=timeout_s)
        else:
            opened = open_client(httpx.Client, base, timeout=timeout_s)
        with opened as client:
            response = client.request(method, f"{base}{path}", headers=headers, json=body)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = reason_of(error)
        raise HubError(
            f"no edgespec server answers at {url} ({reason[:1].lower()}{reason[1:]}).",
            hint="Start one with `edgespec serve`."
            if "://" in base
            else f"Give a URL, such as http://127.0.0.1:{PORT}.",
        ) from error
    answer, message = _read_answer(response.content)
    refusal = answer.get("error")
    if isinstance(refusal, dict) and refusal.get("code") == "model_not_found":
        raise UnknownModel(message, hint=f"`edgespec ps --url {url}` lists its models.")
    if response.status_code != 200 and message:
        raise InvalidRequest(
            f"the server rejects the request: {message}",
            hint="Give --api-key, or set EDGESPEC_API_KEY." if response.status_code == 401 else "Change the request.",
        )
    if response.status_code != 200 or expected not in answer:
        raise HubError(f"{url} answers, but is no edgespec server.", hint="Name another one with --url.")
    return answer


def _find_base(url: str) -> str:
    """The root of a server, whose URL `edgespec serve` prints with /v1."""
    return url.rstrip("/").removesuffix("/v1")


def _read_answer(content: bytes) -> tuple[dict[str, Any], str]:
    """(the JSON object that a server has sent, empty where it is none; what it says of an error)"""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return {}, ""
    if not isinstance(answer, dict):
        return {}, ""
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    return answer, error if isinstance(error, str) else ""


# `edgespec launch`: settings for other programs that use the server, as templates.


_ASSUMED_CONTEXT = 32_768
_ANSWER_SHARE = 4  # of the context, which a program should leave for an answer, is 1 / 4


class _Client(NamedTuple):
    """A program that can use the server.

    place          where its settings go
    settings       a template of Jinja. `any_key` is for a program that does not start without one
    tried          the version that the settings were tried with
    prompt_tokens  about the length of its first prompt, where it is known to be long
    """

    place: str
    settings: str
    tried: str
    prompt_tokens: int = 0


_AIDER = """\
cat > edgespec.model.metadata.json <<'END'
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
aider --model {{ ("openai/" + model)|quote }} --model-metadata-file edgespec.model.metadata.json
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
    "can_stream": true
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
    "codex": _Client("~/.codex/config.toml", _CODEX, "0.171.0", 9_000),
    "llm": _Client("extra-openai-models.yaml next to the file that `llm logs path` prints (YAML reads JSON)", _LLM,
                   "0.32.1"),
    "opencode": _Client("~/.config/opencode/opencode.json", _OPENCODE, "1.18.33"),
    "qwen": _Client("the shell", _QWEN, "0.15.10", 19_000),
}  # fmt: skip


@click.command("launch")
@click.argument("client", metavar="CLIENT", type=click.Choice(sorted(_CLIENTS)))
@click.option("--model", help="Model to use. [default: the server's first]")
@server_options
def launch_command(client: str, model: str | None, url: str, api_key: str | None) -> None:
    """Print the settings that make CLIENT use a running server.

    CLIENT is aider, claude, codex, llm, opencode or qwen.
    """
    from jinja2 import Environment

    if url.startswith(_UNIX):
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
    if about.prompt_tokens > context:
        larger = 2 ** (about.prompt_tokens * 2 - 1).bit_length()
        more = "restart the server with --ctx" if chosen["state"] != "remote" else "start the server behind it with"
        size = f"the context of {name} holds {context:,}: {more} {larger}"
        click.echo(f"# {client}'s first prompt has about {about.prompt_tokens:,} tokens, but {size}", err=True)
    base, keys = _find_base(url), {"key": api_key, "any_key": api_key or "none"}
    sizes = {"context": context, "answer": context // _ANSWER_SHARE}
    settings = environment.from_string(about.settings).render(url=base, v1=f"{base}/v1", model=name, **keys, **sizes)
    click.echo(settings, nl=False)


# `edgespec key`: the API keys of a server.


_FILE_NAME = "keys.toml"


def _default_path() -> Path:
    from edgespec.registry.schema import config_dir

    return config_dir() / _FILE_NAME


_file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default=_default_path,
    show_default=False,
    help=f"File of the keys.  [default: {_FILE_NAME} in the configuration folder]",
)


@click.group("key")
def key_command() -> None:
    """API keys for `edgespec serve --keys FILE`. The file holds names and hashes; a key is shown once, when made."""


@key_command.command("add")
@click.argument("name")
@click.option("--manage", is_flag=True, help="The key may also load and unload models.")
@click.option(
    "--memory", is_flag=True, help="Keep the key's texts on the server, and draft from them for this key alone."
)
@_file_option
def add_command(name: str, manage: bool, memory: bool, path: Path) -> None:
    """Make a key for a client called NAME and print it. The log and the metrics of the server show NAME.

    A running server reads the file again when it changes.
    """
    from edgespec.server.auth import add_key

    key = add_key(path, name, may_manage=manage, remembers=memory)
    click.echo(f"The key of {name}, which is stored nowhere else:", err=True)
    click.echo(key)
    click.echo(f"Its hash is in {path}: edgespec serve --keys {path}", err=True)
    _forget(name)  # of a key of this name whose entry was removed by hand


@key_command.command("list")
@_file_option
@json_option
def list_command(path: Path, as_json: bool) -> None:
    """List the names of the keys, and what they may do."""
    from edgespec.server.auth import read_keys

    callers = [*read_keys(path).values()] if path.exists() else []
    if as_json:
        shown = [{"name": each.name, "manages": each.may_manage, "remembers": each.remembers} for each in callers]
        click.echo(json.dumps(shown, ensure_ascii=False))
        return
    if not callers:
        chosen = "" if path == _default_path() else f" --file {path}"
        click.echo(f"There are no keys in {path}; `edgespec key add NAME{chosen}` makes one.")
        return
    rows = [
        (
            each.name,
            "generate and manage models" if each.may_manage else "generate",
            "kept for drafts" if each.remembers else "not kept",
        )
        for each in callers
    ]
    click.echo("\n".join(format_table([("NAME", "MAY", "TEXTS"), *rows])))


@key_command.command("rm")
@click.argument("name")
@_file_option
def rm_command(name: str, path: Path) -> None:
    """Remove the key called NAME, and its texts. A running server refuses it from then on."""
    from edgespec.server.auth import remove_key

    remove_key(path, name)
    click.echo(f"removed {name} from {path}")
    if n := _forget(name):
        click.echo(f"removed its texts, {n:,} tokens, from the memory")


def _forget(name: str) -> int:
    """Remove what the memory has of a key; returns the number of tokens."""
    from edgespec.cli.memory import open_store
    from edgespec.folders import memory_folder
    from edgespec.server.record import name_namespace

    if not memory_folder().is_dir():
        return 0
    with open_store() as store:
        return store.clear(name_namespace(name))


# `edgespec service`: units that start the server with the session of a user, for systemd and launchd.


_LABEL = "io.github.edgespec"
_KEPT = re.compile(
    r"EDGESPEC_(?!API_KEY)\w+|XDG_(CACHE|CONFIG|DATA)_HOME|HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT)"
    r"|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
)
_UNIT = """\
[Unit]
Description=edgespec, language models over HTTP
Documentation=https://github.com/edgespec/edgespec/blob/main/docs/server.md
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={folder}
{environment}# May hold EDGESPEC_API_KEY=..., for its owner only (chmod 600).
EnvironmentFile=-%E/edgespec/serve.env
Restart=on-failure
RestartSec=5
# The server ends the processes of its models itself, and goes on if one of them has too little memory.
KillMode=mixed
TimeoutStopSec=20
OOMPolicy=continue
# ProtectSystem= and the like are left out: they need user namespaces, which some systems deny to users. So is
# MemoryDenyWriteExecute=, which drivers of GPUs do not bear.
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""
_STEPS = {
    "systemd": (
        "for ~/.config/systemd/user/edgespec.service; then:",
        "systemctl --user daemon-reload && systemctl --user enable --now edgespec",
        "journalctl --user -u edgespec  shows the log; `loginctl enable-linger` starts it without a login",
    ),
    "launchd": (
        f"for ~/Library/LaunchAgents/{_LABEL}.plist; then:",
        f"launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{_LABEL}.plist",
        "~/Library/Logs/edgespec.log has the log",
    ),
}


@click.command("service", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("manager", metavar="systemd|launchd", type=click.Choice(["systemd", "launchd"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF serve]...")
def service_command(manager: str, arguments: tuple[str, ...]) -> None:
    """Print a unit that runs `edgespec serve` with ARGUMENTS as a service of this user.

    Paths among ARGUMENTS may be relative: the service runs in the present folder. It gets the variables that name the
    folders of models and settings. Keys do not belong into a unit: use --keys FILE.
    """
    context = serve_command.make_context("edgespec serve", list(arguments))
    if context.get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
        raise InvalidRequest("a unit is no place for a key.", hint="Use --keys FILE; `edgespec key add` makes keys.")
    read_models(context.params["models"], context.params)  # raises for one that the service could not serve
    command = [sys.executable, "-P", "-m", "edgespec", "serve", *arguments]
    environment = {name: value for name, value in sorted(os.environ.items()) if _KEPT.fullmatch(name)}
    for line in _STEPS[manager]:
        click.echo(f"# {line}", err=True)
    write = format_systemd if manager == "systemd" else format_launchd
    click.echo(write(command, environment, Path.cwd()), nl=False)


def format_systemd(command: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    variables = "".join(f"Environment={_quote(f'{name}={value}')}\n" for name, value in environment.items())
    words = " ".join(_quote(word).replace("$", "$$") for word in command)
    return _UNIT.format(command=words, environment=variables, folder=str(folder).replace("%", "%%"))


def _quote(word: str) -> str:
    """A word as systemd reads it, in quotes where it is not plain. See "Quoting" in systemd.service(5)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", word) else f'"{escaped}"'


def format_launchd(command: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    """A property list for ~/Library/LaunchAgents. Standard processes of launchd get less of the processor."""
    log = str(Path.home() / "Library" / "Logs" / "edgespec.log")
    properties = {
        "Label": _LABEL,
        "ProgramArguments": list(command),
        "WorkingDirectory": str(folder),
        "EnvironmentVariables": environment,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(properties, sort_keys=False).decode()
