"""Ollama's interface, as raw lines."""

from __future__ import annotations

import json
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from edgespec.answers.response import ReasoningDelta
from edgespec.answers.thinking import Thinking
from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory
from edgespec.models.fit import Fit, MemoryEstimate
from edgespec.server.ollama import OllamaChatRequest, list_running
from edgespec.text.tool_calls import CallEnd, CallStart, ToolCall
from edgespec.units import GIB
from tests.gguf_models import TARGET
from tests.server.serving import PROMPT, Server

MODEL = "embedded"
USER: list[Any] = [{"role": "user", "content": PROMPT}]
OPTIONS = {"num_predict": 12, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson" and response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def counted(line: dict[str, Any]) -> tuple[int, int, str]:
    """The counts of a last line, after a check of its times."""
    parts = [line[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert all(isinstance(each, int) and each >= 0 for each in parts)
    assert line["total_duration"] > 0 and line["done"] is True
    assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
    return line["prompt_eval_count"], line["eval_count"], line["done_reason"]


def test_the_times_of_a_chat(pair: Server) -> None:
    body = {"model": f"{MODEL}:latest", "messages": USER, "options": OPTIONS}
    whole = pair.post("/api/chat", json={**body, "stream": False}).json()
    assert whole["model"] == f"{MODEL}:latest" and whole["message"]["role"] == "assistant" and "warnings" not in whole
    assert counted(lines(pair.post("/api/chat", json=body))[-1]) == counted(whole)
    start = {"role": "assistant", "content": whole["message"]["content"]}
    more = pair.post("/api/chat", json={**body, "messages": [*USER, start], "stream": False}).json()
    assert more["prompt_eval_count"] > whole["prompt_eval_count"]


def test_generate_and_its_options(pair: Server) -> None:
    raw = {"model": MODEL, "prompt": PROMPT, "raw": True, "stream": False, "options": OPTIONS}
    made = pair.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0})
    text = made.json()["choices"][0]["text"]
    assert pair.post("/api/generate", json=raw).json()["response"] == text
    plain = {"content-type": "application/x-www-form-urlencoded"}  # curl's default, as in Ollama's examples
    streamed = lines(pair.post("/api/generate", content=json.dumps({**raw, "stream": True}), headers=plain))
    assert "".join(line["response"] for line in streamed) == text
    word = text.split()[2]
    options = {**OPTIONS, "stop": [word], "num_ctx": 4096, "seed": -1}
    stopped = pair.post("/api/generate", json={**raw, "options": options}).json()
    assert stopped["response"] == text[: text.index(word)] and stopped["done_reason"] == "stop"
    assert [warning.split()[0] for warning in stopped["warnings"]] == ["options.num_ctx"]
    chat = {"model": MODEL, "prompt": PROMPT, "stream": False, "options": {"num_predict": 1}}
    alone, told = (pair.post("/api/generate", json={**chat, **system}).json() for system in ({}, {"system": "a b c"}))
    assert told["prompt_eval_count"] > alone["prompt_eval_count"]


def test_a_high_temperature_is_taken(pair: Server) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": False, "options": {"num_predict": 2, "temperature": 2.5}}
    assert pair.post("/api/generate", json=body).json()["eval_count"] == 2


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_logprobs(pair: Server, path: str) -> None:
    """Each line has those of its text; the whole answer has all, as /v1/chat/completions has them."""
    options = {"temperature": 0, "num_predict": 12, "seed": 1}
    prompt = {"prompt": PROMPT} if path == "/api/generate" else {"messages": USER}
    body = {**prompt, "options": options, "logprobs": True, "top_logprobs": 2}
    whole = pair.post(path, json={**body, "stream": False}).json()["logprobs"]
    text = b"".join(bytes(each["bytes"]) for each in whole).decode()
    assert len(whole) == 12 and all(len(each["top_logprobs"]) == 2 and each["logprob"] <= 0 for each in whole)
    lines = [json.loads(line) for line in pair.post(path, json=body).text.splitlines()]
    written = "".join(line["response"] if "response" in line else line["message"]["content"] for line in lines)
    streamed = [each for line in lines for each in line.get("logprobs", ())]
    assert len(lines) > 2 and [each["token"] for each in streamed] == [each["token"] for each in whole]
    assert written in text and all("logprobs" in line for line in lines[:-1])
    assert "logprobs" not in pair.post(path, json={**prompt, "options": options, "stream": False}).json()


def test_formats(pair: Server) -> None:
    properties = {"is_read": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["is_read"], "additionalProperties": False}
    body = {"prompt": PROMPT, "stream": False, "options": {"temperature": 0, "num_predict": 200}}
    made = pair.post("/api/generate", json={**body, "format": schema}).json()
    assert set(json.loads(made["response"])) == {"is_read"} and made["done_reason"] == "stop"
    assert made["model"] == MODEL  # there is one model, and the request names none
    begun = pair.post("/api/generate", json={**body, "format": "json"}).json()["response"]
    assert begun.lstrip().startswith("{")


def test_tools_and_reasoning_of_past_and_present_answers(pair: Server) -> None:
    call = {"function": {"name": "read", "arguments": {"path": "a.txt"}}}
    asked = {"role": "assistant", "content": "", "thinking": "A file.", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "read", "content": "some text of the file"}
    body: dict[str, Any] = {"messages": [*USER, asked, result], "stream": False, "options": {"num_predict": 1}}
    without = pair.post("/api/chat", json=body).json()
    assert (
        pair.post("/api/chat", json={**body, "tools": [TOOL]}).json()["prompt_eval_count"]
        > (without["prompt_eval_count"])
    )
    request = OllamaChatRequest.model_validate({**body, "think": "low"})
    (spec,) = request.generation_specs()
    assert spec.thinking == Thinking(is_on=True, effort="low")
    writer, streamed = request.writer(), []
    calls = [CallStart(0, "read"), CallEnd(0, ToolCall("read", '{"path":"a.txt"}')),
             CallStart(1, "read"), CallEnd(1, ToolCall("read", '{"path":"a'), is_cut=True)]  # fmt: skip
    for part in (ReasoningDelta("A file."), *calls):
        streamed += [line["message"] for line in writer.events(0, part)]
    assert streamed[0]["thinking"] == "A file." and streamed[0]["content"] == ""
    (written,) = [each for line in streamed[1:] for each in line["tool_calls"]]
    assert written["function"] == {"index": 0, **call["function"]}


def test_models_are_listed_loaded_and_unloaded(pair: Server) -> None:
    (tag,) = pair.get("/api/tags").json()["models"]
    assert tag["name"] == tag["model"] == f"{MODEL}:latest" and len(tag["digest"]) == 64 and tag["details"]
    size, details = TARGET.stat().st_size, tag["details"]
    assert 0.5 * size < tag["size"] < size and details["format"] == "gguf" and details["family"] == "llama"
    assert details["parameter_size"] == "6M" and details["quantization_level"].startswith("Q")
    gone = pair.post("/api/chat", json={"model": MODEL, "messages": [], "keep_alive": "0s"}).json()
    assert gone["done_reason"] == "unload" and gone["message"] == {"role": "assistant", "content": ""}
    assert pair.get("/api/ps").json() == {"models": []} and not pair.model(MODEL)["is_open"]
    loaded = pair.post("/api/generate", json={"model": MODEL}).json()
    assert loaded["done_reason"] == "load" and loaded["response"] == "" and loaded["done"] is True
    (running,) = pair.get("/api/ps").json()["models"]
    assert running["name"] == tag["name"] and running["size"] > 0 and running["context_length"] == 512
    assert datetime.fromisoformat(running["expires_at"]) > datetime.fromisoformat(tag["modified_at"])
    shown = pair.post("/api/show", json={"name": tag["name"]}).json()
    assert {"completion", "tools"} <= set(shown["capabilities"]) and shown["template"]
    assert shown["model_info"]["edgespec.context_length"] == 512 and shown["details"] == details
    assert shown["model_info"]["general.parameter_count"] > 5e6 and running["details"] == details
    assert pair.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("pull", "edgespec pull"),
        ("create", "--config"),
        ("copy", "NAME=REF"),
        ("push", "hub"),
        ("delete", "edgespec rm"),
    ],
)
def test_what_manages_files_is_refused_with_the_command(pair: Server, path: str, command: str) -> None:
    method = "DELETE" if path == "delete" else "POST"
    refused = httpx.request(method, f"{pair.url}/api/{path}", json={"model": MODEL})
    assert refused.status_code == 501 and command in refused.json()["error"]


@pytest.mark.parametrize(("on_gpu", "told"), [(0, 0), (4 * GIB, 4 * GIB), (20 * GIB, 8 * GIB)])
def test_the_part_of_a_model_on_gpus_is_listed(on_gpu: int, told: int) -> None:
    gpu = DeviceMemory("CUDA0", RESERVE_BYTES + on_gpu, 24 * GIB)
    fit = Fit(512, 1, MemoryEstimate(8 * GIB, 0, 0), None, Memory(32 * GIB, (gpu,)))
    info = SimpleNamespace(fit=fit, backend="llamacpp", context_size=512)
    slot = SimpleNamespace(name="a", model_info=info, unloads_in_s=60.0, facts=None)
    (running,) = list_running(cast("Any", SimpleNamespace(slots={"a": slot})))["models"]
    assert (running["size"], running["size_vram"]) == (8 * GIB, told)
