"""`edgespec ps` and `edgespec stop`: the models of a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

import click

from edgespec.cli.options import add_options, json_option
from edgespec.cli.output import format_table, print_result
from edgespec.cli.serve import PORT
from edgespec.cli.terminal import format_speed
from edgespec.errors import HubError, InvalidRequest, UnknownModel, reason_of
from edgespec.proxies import open_client
from edgespec.units import count, gib

_TIMEOUT_S = 30.0
UNIX = "unix:"
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
        trees = f", {gib(sizes['trees'])} of a cache for trees" if sizes.get("trees") else ""
        yield (
            f"{gib(sizes['weights'])} of weights, {gib(sizes['kv'])} of KV cache, {gib(sizes['scratch'])} of scratch"
            f" memory, {gib(sizes['draft'])} of drafts{trees}; one more slot, of {model['context_size']:,} tokens,"
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
    if not now:
        _tell_wait(model, read_props(url, api_key)["models"])
    http_json("POST", url, "/models/unload", api_key, "success", body, timeout_s=None)
    click.echo(f"{model} is unloaded")


def _tell_wait(name: str, models: list[dict[str, Any]]) -> None:
    """Say what the model is waited for, if it is."""
    found = next((each for each in models if each["name"] == name), None)
    if found is None:
        return
    running = [
        *([count(found["answering"], "answer")] if found["answering"] else []),
        *([f"{count(found['waiting'], 'request')} in the queue"] if found["waiting"] else []),
    ]
    if running:
        click.echo(f"waiting for {' and '.join(running)} of {name}; --now ends them", err=True)
    elif found["state"] == "loading":
        click.echo(f"waiting until {name} is loaded; --now ends that", err=True)


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

    is_unix = url.startswith(UNIX)
    base = "http://localhost" if is_unix else find_base(url)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if is_unix:
            opened = httpx.Client(transport=httpx.HTTPTransport(uds=url.removeprefix(UNIX)), timeout=timeout_s)
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


def find_base(url: str) -> str:
    """The root of a server, whose URL `edgespec serve` prints with /v1."""
    return url.rstrip("/").removesuffix("/v1")


def _read_answer(content: bytes) -> tuple[dict[str, Any], str]:
    """Returns (the JSON object that a server has sent, empty if it is none; its error message, "" without one)."""
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
