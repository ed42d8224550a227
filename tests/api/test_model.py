"""`load`, `generate`, `stream` and `chat` on the embedded pair."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import psutil
import pytest

import edgespec

PROMPT = "def read_lines(path):"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "resize", "parameters": SCHEMA}}


def test_a_draft_does_not_change_the_text(model: edgespec.Model) -> None:
    drafted = model.generate(PROMPT, max_tokens=48, temperature=0)
    with edgespec.load(threads=1, draft="none", exact=True, ctx=1024) as plain:
        assert plain.generate(PROMPT, max_tokens=48, temperature=0).tokens == drafted.tokens
        assert plain.stats.drafted_tokens == 0
    assert drafted.stats.accepted_tokens > 0
    assert drafted.finish_reason == "length"
    assert len(drafted.tokens) == 48


def test_the_death_of_an_isolated_model_is_an_error(model: edgespec.Model) -> None:
    with edgespec.load(threads=1, draft="ngram", isolated=True) as isolated:
        here, apart = (each.generate(PROMPT, max_tokens=8, temperature=0) for each in (model, isolated))
        assert here.text == apart.text
        stream = isolated.stream(PROMPT, max_tokens=2000, temperature=0)
        next(stream)
        (engine,) = [each for each in psutil.Process().children() if "serve_engine" in " ".join(each.cmdline())]
        engine.send_signal(signal.SIGABRT)
        with pytest.raises(edgespec.BackendError, match="SIGABRT"):
            stream.read()


def test_pieces_add_up_to_the_reply(model: edgespec.Model) -> None:
    stream = model.stream(PROMPT, max_tokens=64, temperature=0)
    with pytest.raises(edgespec.InvalidRequest, match="not complete"):
        _ = stream.reply
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == stream.reply.text == str(stream.reply)
    assert {piece.drafter for piece in pieces} == {"", "ngram"}
    assert stream.reply.text == model.generate(PROMPT, max_tokens=64, temperature=0).text


def test_leaving_a_stream_cancels_the_generation(model: edgespec.Model) -> None:
    for _ in model.stream(PROMPT, max_tokens=1000, seed=1):
        break
    stream = model.stream(PROMPT, max_tokens=1000, seed=1)
    next(stream)
    stream.close()
    assert list(stream) == []
    with pytest.raises(edgespec.InvalidRequest):
        stream.read()
    assert len(model.generate(PROMPT, max_tokens=4).tokens) <= 4


def test_a_stop_text_ends_the_answer(model: edgespec.Model) -> None:
    whole = model.generate(PROMPT, max_tokens=48, temperature=0).text
    reply = model.generate(PROMPT, max_tokens=48, temperature=0, stop="return")
    assert (reply.finish_reason, reply.stop) == ("stop", "return")
    assert reply.text == whole.partition("return")[0]
    assert model.generate(PROMPT, max_tokens=48, temperature=0, stop=["zzz", "return"]).text == reply.text


def test_messages_and_a_system_message(model: edgespec.Model) -> None:
    said = model.chat([{"role": "user", "content": PROMPT}], max_tokens=8, temperature=0)
    assert said.tokens == model.chat(PROMPT, max_tokens=8, temperature=0).tokens
    assert said.tokens == model.chat([edgespec.Message("user", PROMPT)], max_tokens=8, temperature=0).tokens
    assert said.message == {"role": "assistant", "content": said.text}
    model.chat(PROMPT, system="import os", max_tokens=1)
    assert model.stats.prompt_tokens > said.stats.prompt_tokens


def test_a_schema_is_followed(model: edgespec.Model) -> None:
    reply = model.chat(PROMPT, schema=SCHEMA, max_tokens=200, temperature=0)
    assert reply.finish_reason == "stop"
    jsonschema.validate(json.loads(reply.text), SCHEMA)


def test_a_tool_is_called_and_its_result_is_read(model: edgespec.Model) -> None:
    reply = model.chat(PROMPT, tools=[TOOL], tool_choice="resize", max_tokens=200, temperature=0)
    (call,) = reply.tool_calls
    assert call.name == "resize"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert reply.text == ""
    (told,) = reply.message["tool_calls"]
    assert told == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "resize", "arguments": call.arguments},
    }
    result = {"role": "tool", "tool_call_id": "call_0", "content": "done"}
    answer = model.chat([{"role": "user", "content": PROMPT}, reply.message, result], max_tokens=4)
    assert answer.tool_calls == ()
    for calls in (["x"], [{}], [{"function": "resize"}], 7, "resize"):
        with pytest.raises(edgespec.InvalidRequest, match="a tool call of a message has a function"):
            model.chat([{"role": "assistant", "content": "", "tool_calls": calls}], max_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"tools": [{"name": "resize"}]}, "a tool has"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [TOOL], "tool_choice": "other"}, "'other'"),
        ({"schema": {**SCHEMA, "if": {"minProperties": 2}}}, "Unimplemented keys"),
        ({"system": "Be brief."}, "system message"),
        ({"stop": 5}, "stop is a text or a list of texts, not 5"),
        ({"stop": 0}, "stop is a text or a list of texts, not 0"),
        ({"stop": ["a", 5]}, "stop is a text or a list of texts"),
    ],
)
def test_a_value_that_cannot_work(model: edgespec.Model, arguments: edgespec.GenerationArguments, message: str) -> None:
    with pytest.raises(edgespec.InvalidRequest, match=message):
        model.generate(PROMPT, **arguments)


def test_a_prompt_that_does_not_fit(model: edgespec.Model) -> None:
    with pytest.raises(edgespec.ContextOverflow):
        model.generate("x = 1\n" * 1000)


def test_unknown_arguments(model: edgespec.Model) -> None:
    with pytest.raises(TypeError, match=r"generate.*'temprature'.*'temperature'"):
        model.generate(PROMPT, temprature=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"load.*'gamma'"):
        edgespec.load(gamma=3)  # type: ignore[call-arg]


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(edgespec.UnknownModel, match="pyhton-6m"):
        edgespec.load("pyhton-6m")
    with pytest.raises(edgespec.UnknownModel, match=r"There is no file /.*/x\.gguf"):
        edgespec.load(Path("x.gguf"))
    with pytest.raises(edgespec.InvalidRequest, match="named by a text or a path, not by 5"):
        edgespec.load(5)  # type: ignore[arg-type]
    with pytest.raises(edgespec.InvalidRequest, match="acceptance"):
        edgespec.load(acceptance="always")  # type: ignore[arg-type]
    with pytest.raises(edgespec.InvalidRequest):
        edgespec.load(ctx=1)


@pytest.mark.parametrize("messages", ["", []])
def test_an_empty_prompt_is_refused(messages: Any) -> None:
    with edgespec.load("tree", backend="toy") as model, pytest.raises(edgespec.InvalidRequest, match="prompt is empty"):
        model.chat(messages)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_closed_model_is_refused(isolated: bool) -> None:
    toy = edgespec.load("linear", backend="toy", isolated=isolated)
    stream = toy.stream(PROMPT)
    toy.close()
    toy.close()
    for use in (lambda: toy.generate(PROMPT), stream.read, toy._client.stream(mock.sentinel.request).result):
        with pytest.raises(edgespec.BackendError, match="closed"):
            use()


FORGET = "next(model.stream('abc'))"
FORK = """
import os, signal, sys
model.chat('abc', max_tokens=2)
stream = model.stream('abc')
if (child := os.fork()) == 0:
    signal.alarm(30)
    for use in (lambda: model.generate('abc'), stream.read):
        try:
            use()
        except edgespec.BackendError as error:
            assert 'another process' in str(error)
        else:
            sys.exit('the model answers')
    model.close()
    assert len(edgespec.load('linear', backend='toy').chat('abc', max_tokens=2).tokens) == 2
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert len(model.chat('abc', max_tokens=2).tokens) == 2
"""


@pytest.mark.parametrize("program", [FORGET, FORK])
def test_a_forgotten_model_does_not_hold_up_the_end_of_the_program(program: str) -> None:
    import subprocess
    import sys

    code = f"import edgespec; model = edgespec.load('linear', backend='toy'); {program}"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, "")


def test_notices_and_progress_go_to_the_reporter_or_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.notices: list[str] = []
            self.names: set[str] = set()

        def notice(self, text: str) -> None:
            self.notices.append(text)

        def download(self, name: str, done: int, total: int) -> None:
            raise AssertionError("nothing is downloaded")

        def loading(self, name: str, fraction: float) -> None:
            self.names.add(name)

    recorder = Recorder()
    edgespec.load(threads=1, draft="none", ctx=256, reporter=recorder).close()
    assert "target.gguf" in recorder.names
    with caplog.at_level(logging.INFO, logger="edgespec"):
        edgespec.load(threads=1, draft="none", ctx=256).close()
    assert any("loading target.gguf" in record.message for record in caplog.records)
