"""`edgespec ps` and `edgespec stop`: the models of a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from edgespec.cli.options import json_option
from edgespec.cli.serve import PORT
from edgespec.cli.terminal import format_speed, format_table, print_result

F = TypeVar("F", bound=Callable[..., Any])
_TIMEOUT_S = 30.0
_UNIX = "unix:"
_MINUTES_S = 120  # from which on times are in minutes


def server_options(command: F) -> F:
    """Add the options that name a server and its key."""
    for option in (
        click.option("--api-key", envvar="EDGESPEC_API_KEY", help="The server's key. [env: EDGESPEC_API_KEY]"),
        click.option(
            "--url", default=f"http://127.0.0.1:{PORT}", show_default=True, help="URL of the server, or unix:PATH."
        ),
    ):
        command = option(command)
    return command


@click.command("ps")
@json_option
@server_options
def ps_command(as_json: bool, url: str, api_key: str | None) -> None:
    """List the models of a running server."""
    props = http_json("GET", url, "/props", api_key)
    print_result(props, _format(props), as_json=as_json)


def _format(props: dict[str, Any]) -> Iterator[str]:
    from edgespec.units import gib

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
    from statistics import median

    from edgespec.units import count

    timed = [each for each in calls if each["tpot"] and each["step_p99"]]
    if timed:
        tpot_s, p99_s = (median(each[name] for each in timed) for name in ("tpot", "step_p99"))
        yield f"{format_speed(tpot_s, p99_s)}, median of {count(len(timed), 'answer')}"
    for drafter in model.get("drafters", ()):
        yield (
            f"drafts of {drafter['label']} are accepted {drafter['acceptance']:.0%} of the time over"
            f" {count(drafter['answers'], 'answer')}, {drafter['recent_acceptance']:.0%} in the last ones"
        )
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
    http_json("POST", url, "/models/unload", api_key, {"model": model, "now": now}, timeout_s=None)
    click.echo(f"unloaded {model}")


def http_json(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    body: dict[str, Any] | None = None,
    timeout_s: float | None = _TIMEOUT_S,
) -> Any:
    """Send a request and return the server's JSON response. Raises HubError if no server answers, InvalidRequest."""
    import httpx

    from edgespec.errors import HubError, InvalidRequest, reason_of

    is_unix = url.startswith(_UNIX)
    transport = httpx.HTTPTransport(uds=url.removeprefix(_UNIX)) if is_unix else None
    base = "http://localhost" if is_unix else url.rstrip("/")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(transport=transport, timeout=timeout_s) as client:
            response = client.request(method, f"{base}{path}", headers=headers, json=body)
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = reason_of(error)
        raise HubError(
            f"no edgespec server answers at {url} ({reason[:1].lower()}{reason[1:]}).",
            hint="Start one with `edgespec serve`.",
        ) from error
    if response.status_code != 200:
        message = answer.get("error", {}).get("message", "") if isinstance(answer, dict) else ""
        raise InvalidRequest(
            f"the server rejects the request: {message or response.status_code}", hint="`edgespec ps` lists its models."
        )
    return answer
