"""An agent's session with tools, results and images: what one turn is refused for does not end it.

The model writes what a script says, by words of its prompt; see tests/scripted_model.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

from edgespec.errors import InvalidRequest
from edgespec.server.fields import ContentPart, Said
from edgespec.server.media import require_text
from tests.gguf_models import TARGET
from tests.scripted_model import Step, write_scripted_model
from tests.server.interfaces import CHAT, CHATS, DEMAND, MESSAGES, OLLAMA, RESPONSES
from tests.server.serving import Server, serving

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
READ = '<tool_call>\n{"name": "read", "arguments": {"path": "pears.txt"}}\n</tool_call>'
EDIT = READ.replace("read", "edit").replace('"}}', '", "before": "unripe", "after": "mellow"}}')
DONE, BLIND = "The pears are right now.", "I am told of a picture, and see none."
STEPS = (Step("", READ), Step("unripe", EDIT), Step("mellow", DONE), Step("image left out", BLIND))
TOOLS = {"read": ("path",), "edit": ("path", "before", "after")}
IMAGE = "iVBORw0KGgo="
PICTURE = "data:image/png;base64," + IMAGE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted_model(folder / "scripted.gguf", TARGET, TEMPLATE, STEPS)
    options = ("--no-memory", "--draft", "none", "--threads", "1", "--ctx", "4096")
    with serving(folder, str(folder / "scripted.gguf"), *options) as served:
        yield served


class Session:
    """A conversation as an agent holds it: whatever it has sent stays in its history."""

    def __init__(self, server: Server, path: str) -> None:
        self._server, self.path = server, path
        self.history: list[dict[str, Any]] = []
        self.tools = [_format_tool(path, name, fields) for name, fields in TOOLS.items()]

    def say(self, text: str, *, image: bool = False, joins: bool = False) -> None:
        """Add a message of the user. `joins`: to the one before, as Claude Code does if nothing has answered that."""
        if self.path == OLLAMA:
            self.history.append({"role": "user", "content": text, **({"images": [IMAGE]} if image else {})})
            return
        content = [{"type": "input_text" if self.path == RESPONSES else "text", "text": text}]
        content += [_format_image(self.path)] if image else []
        if joins:
            self.history[-1]["content"] += content
        else:
            self.history.append({"role": "user", "content": content})

    def post(self, **more: Any) -> httpx.Response:
        name = "input" if self.path == RESPONSES else "messages"
        history = _mark_end(self.history) if self.path == MESSAGES else self.history
        limit = {"options": {"num_predict": 200}} if self.path == OLLAMA else {"max_tokens": 200}
        body = {name: history, "tools": self.tools, "stream": False, **limit, **more}
        return self._server.post(self.path, json=body)

    def answer(self) -> dict[str, Any]:
        """The body of the answer, which the history has from then on."""
        response = self.post()
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        if self.path == RESPONSES:
            self.history += body["output"]
        elif self.path == MESSAGES:
            self.history.append({"role": "assistant", "content": body["content"]})
        else:
            self.history.append((body["choices"][0] if self.path == CHAT else body)["message"])
        return body

    def call(self, tool: str, result: str, *, image: bool = False) -> None:
        """The model's answer must be a call of `tool`, which has this result."""
        self.answer()
        made = self.history[-1]
        if self.path == RESPONSES:
            told: Any = [{"type": "input_text", "text": result}, *([_format_image(self.path)] if image else [])]
            assert (made["type"], made["name"]) == ("function_call", tool)
            self.history.append({"type": "function_call_output", "call_id": made["call_id"], "output": told})
        elif self.path == MESSAGES:
            told = [{"type": "text", "text": result}, *([_format_image(self.path)] if image else [])]
            (use,) = made["content"]
            assert (use["type"], use["name"]) == ("tool_use", tool)
            block = {"type": "tool_result", "tool_use_id": use["id"], "content": told}
            self.history.append({"role": "user", "content": [block]})
        else:
            (call,) = made["tool_calls"]
            assert call["function"]["name"] == tool
            images = {"images": [IMAGE]} if image and self.path == OLLAMA else {}
            told = [{"type": "text", "text": result}, _format_image(self.path)] if image and not images else result
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": told, **images})

    def work(self) -> dict[str, Any]:
        """The session up to its first answer in text."""
        self.say("Correct the word in pears.txt.")
        self.call("read", "The pears are unripe.")
        self.call("edit", "Edited.")
        body = self.answer()
        assert DONE in json.dumps(body)
        return body


def _mark_end(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A history with Claude Code's mark for caches at its end, which moves on with it."""
    *before, last = history
    if isinstance(last["content"], str):
        return history
    *blocks, end = last["content"]
    return [*before, {**last, "content": [*blocks, {**end, "cache_control": {"type": "ephemeral"}}]}]


def _format_tool(path: str, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {field: {"type": "string"} for field in fields}}
    if path == MESSAGES:
        return {"name": name, "input_schema": schema}
    function = {"name": name, "parameters": schema}
    return {"type": "function", **function} if path == RESPONSES else {"type": "function", "function": function}


def _format_image(path: str) -> dict[str, Any]:
    if path == RESPONSES:
        return {"type": "input_image", "image_url": PICTURE}
    if path == MESSAGES:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    return {"type": "image_url", "image_url": {"url": PICTURE}}


def count_read(body: dict[str, Any]) -> tuple[int, int]:
    """(tokens of the prompt, those of them that were in the cache)"""
    timings = body["timings"]
    return timings["prompt_n"] + timings["cache_n"], timings["cache_n"]


@pytest.mark.parametrize(("path", "joins"), [*product(DEMAND, [False, True]), (OLLAMA, False)])
def test_a_session_goes_on_after_an_image(path: str, joins: bool, server: Server) -> None:
    session = Session(server, path)
    prompt, _ = count_read(session.work())
    session.say(f"What is this, by {path}?" if joins else "What is this?", image=True)
    told = "is not supported: the model reads text only. Go on with text: the prompt then says that it was left out."
    for is_streamed in (False, True, False):  # sent again, it is refused again
        refused = session.post(stream=is_streamed)
        assert refused.status_code == 400 and told in refused.text, refused.text
    session.say("Never mind.", joins=joins)
    body = session.answer()
    assert BLIND in json.dumps(body), "the prompt names the image"
    assert "image content is left out: the model reads text only." in body["warnings"]
    read, cached = count_read(body)
    assert read > cached >= prompt, "what was said before is in the prompt, and not read again"
    session.say("And now?")
    body = session.answer()
    assert BLIND in json.dumps(body) and count_read(body)[1] >= read


@pytest.mark.parametrize("path", CHATS)
def test_an_image_of_an_answered_turn_is_named(path: str, server: Server) -> None:
    """As when a session changes from a model that sees to one that does not."""
    session = Session(server, path)
    session.say("What is this?", image=True)
    role = {"role": "assistant", "content": "A pear."}
    session.history.append({"type": "message", **role} if path == RESPONSES else role)
    session.say("Is it?")
    assert BLIND in json.dumps(session.answer())


@pytest.mark.parametrize("path", CHATS)
def test_an_image_that_begins_a_conversation(path: str, server: Server) -> None:
    """It is refused in each conversation, also if there is the beginning of an answer."""
    for question in ("Who is this?", "Where is this?"):
        session = Session(server, path)
        session.say(question, image=True)
        assert session.post().status_code == 400
        if path != RESPONSES:
            session.history.append({"role": "assistant", "content": "It is"})
            assert session.post().status_code == 400


@pytest.mark.parametrize("path", CHATS)
def test_an_image_of_a_result_is_named(path: str, server: Server) -> None:
    session = Session(server, path)
    session.say("Look at pears.txt.")
    session.call("read", "A picture:", image=True)
    body = session.answer()
    assert BLIND in json.dumps(body) and len(body["warnings"]) == 2  # the other is of tools


@pytest.mark.parametrize("path", CHATS)
def test_what_is_refused_leaves_the_cache_as_it_is(path: str, server: Server) -> None:
    """An agent that shortens its history, or takes back a tool, finds its prompt again."""
    session = Session(server, path)
    prompt, _ = count_read(session.work())
    session.say("word " * 5000)
    assert session.post().status_code == 400
    session.history.pop()
    session.tools.append(_format_tool(path, "no name", ()))
    assert session.post().status_code == 400
    session.tools.pop()
    session.say("And now?")
    body = session.answer()
    assert DONE in json.dumps(body) and count_read(body)[1] >= prompt


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/chat/completions/input_tokens"])
def test_counts_have_what_the_prompt_says_of_an_image(path: str, server: Server) -> None:
    kind = MESSAGES if "messages" in path else CHAT
    asked = Session(server, kind)
    asked.say("What is this?")
    plain = server.post(path, json={"messages": asked.history}).json()["input_tokens"]
    asked.history[0]["content"].append(_format_image(kind))
    assert server.post(path, json={"messages": asked.history}).json()["input_tokens"] > plain


def test_what_was_refused_is_known_for_its_sender_and_a_while() -> None:
    def is_refused(image: int, owner: str, *more: str) -> bool:
        part = ContentPart.model_validate({"type": "image", "data": image})
        try:
            require_text(
                [Said("user", "What is this?"), Said("user", [part]), *(Said("user", each) for each in more)], owner
            )
        except InvalidRequest:
            return True
        return False

    assert is_refused(0, "one") and is_refused(0, "one") and not is_refused(0, "one", "And now?")
    assert is_refused(0, "other", "And now?") and not is_refused(0, "other", "And now?", "Well?")
    for image in range(1, 1024):
        assert is_refused(image, "one")
    assert is_refused(0, "one", "And now?")


def make_turn(*texts: str, clock: int) -> list[Said]:
    """An image behind texts, at some minute that the system message names."""
    picture = ContentPart(type="image_url", image_url={"url": PICTURE})
    parts = [ContentPart(type="text", text=text) for text in texts]
    return [Said("system", f"It is 12:0{clock}."), Said("user", [picture, *parts])]


@pytest.mark.parametrize("texts", [("what is this",), ()], ids=["asked", "alone"])
def test_a_clock_in_the_system_message_makes_no_new_turn(texts: tuple[str, ...]) -> None:
    """The same turn is refused again, and one that says more goes on."""
    owner = f"clock {texts}"
    for minute in range(3):
        with pytest.raises(InvalidRequest, match="image_url"):
            require_text(make_turn(*texts, clock=minute), owner)
    require_text(make_turn(*texts, "say what you know", clock=3), owner)
