"""/v1/responses: OpenAI's newer interface. Nothing is stored: every call brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.errors import InvalidRequest
from edgespec.server.fields import FEW, MANY, Body, JsonSchema, ModelName, Name, Parts, ResponseFormat, Tokens, joined
from edgespec.server.generation_spec import Choice, GenerationSpec, Settings, loaded_arguments, message
from edgespec.server.http import event_of
from edgespec.server.response import Done, Part, ReasoningDelta, Started, TextDelta, ToolCallDelta, usage_of
from edgespec.server.tools import Tool
from edgespec.text.chat_template import Message


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class InputResult(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class OtherItem(Body):
    type: str


class ResponseTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: Name


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(Body):
    """The body of /v1/responses."""

    model: ModelName
    input: str | Annotated[list[InputMessage | InputCall | InputResult | OtherItem], MANY]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[ResponseTool | OtherItem], FEW] | None = None
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    stream: bool | None = False
    n: Literal[1] = 1

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(self)

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        if self.previous_response_id is not None:
            raise InvalidRequest("responses are not stored here.", hint="Send the whole conversation as input.")
        form = self.text.format if self.text is not None else None
        schema = JsonSchema(schema=form.schema_) if form is not None and form.schema_ is not None else None
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else None
        tools = tuple(self._tools())
        return GenerationSpec(
            prompt=tuple(self._messages()),
            settings=Settings(self.temperature, self.top_p),
            max_tokens=self.max_output_tokens,
            structure=ResponseFormat(type=form.type, json_schema=schema).structure() if form is not None else None,
            tools=tools,
            choice=choice or "auto",
            forced=named,
            several=self.parallel_tool_calls,
        )

    def _tools(self) -> Iterator[Tool]:
        for tool in self.tools or ():
            if isinstance(tool, ResponseTool):  # tools that OpenAI runs itself, such as web_search, are not offered
                yield Tool(tool.name, tool.description or "", tool.parameters or {"type": "object"})

    def _messages(self) -> list[Message]:
        """Instructions and leading system texts as one message, calls that follow each other as one turn."""
        system, said, calls = [self.instructions or ""], list[Message](), list[dict[str, Any]]()
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputCall):
                if not calls:
                    said.append(message("assistant", "", tool_calls=calls))
                function = {"name": item.name, "arguments": loaded_arguments(item.arguments)}
                calls.append({"id": item.call_id, "type": "function", "function": function})
                said[-1] = message("assistant", "", tool_calls=calls)
                continue
            calls = []
            if isinstance(item, InputMessage):
                role = "system" if item.role == "developer" else item.role
                if role == "system" and not said:
                    system.append(joined(item.content))
                else:
                    said.append(message(role, joined(item.content)))
            elif isinstance(item, InputResult):
                said.append(message("tool", joined(item.output), tool_call_id=item.call_id))
            elif item.type != "reasoning":
                raise InvalidRequest(f"this server takes no input of type '{item.type}'.", hint="Leave it out.")
        told = "\n\n".join(text for text in system if text)
        return [message("system", told), *said] if told else said


class ResponsesWriter:
    """One response, whole or as events."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()),
            "model": request.model, "error": None, "instructions": request.instructions, "metadata": {},
            "parallel_tool_calls": bool(request.parallel_tool_calls),
            "temperature": request.temperature, "top_p": request.top_p,
            "tool_choice": request.model_dump(mode="json", include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump(mode="json") for tool in request.tools or ()],
        }  # fmt: skip
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item may grow
        self._number = 0
        self._end: Done | None = None

    def add(self, index: int, part: Part) -> None:
        for _ in self.chunks(index, part):  # the items that these build are the answer
            pass

    def response_body(self) -> dict[str, Any]:
        for _ in self._close():
            pass
        return self._response()

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, Started):
            yield self._event("response.created", response=self._response())
            yield self._event("response.in_progress", response=self._response())
        elif isinstance(part, TextDelta):
            if not self._grows("message"):
                yield from self._begin({"type": "message", "id": _id("msg"), "role": "assistant",
                                        "status": "in_progress", "content": []})  # fmt: skip
                content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._items[-1]["content"].append(content)
                yield self._event("response.content_part.added", **self._place(), content_index=0, part=content)
            self._items[-1]["content"][0]["text"] += part.text
            yield self._event("response.output_text.delta", **self._place(), content_index=0, delta=part.text,
                              logprobs=[])  # fmt: skip
        elif isinstance(part, ReasoningDelta):
            if not self._grows("reasoning"):
                content = {"type": "reasoning_text", "text": ""}
                yield from self._begin({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [content]})
            self._items[-1]["content"][0]["text"] += part.text
            yield self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=part.text)
        elif isinstance(part, ToolCallDelta):
            yield from self._begin({"type": "function_call", "id": _id("fc"), "call_id": _id("call"),
                                    "name": part.call.name, "arguments": "", "status": "in_progress"})  # fmt: skip
            self._items[-1]["arguments"] = part.call.arguments
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=part.call.arguments)
            yield self._event("response.function_call_arguments.done", **self._place(), name=part.call.name,
                              arguments=part.call.arguments)  # fmt: skip
            yield from self._close()
        elif isinstance(part, Done):
            self._end = part

    def finish(self) -> Iterator[bytes]:
        yield from self._close()
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def _response(self) -> dict[str, Any]:
        end = self._end
        if end is None:
            return {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        usage = usage_of([end])
        cut = end.reason == "length"
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                      "total_tokens": usage["total_tokens"],
                      "input_tokens_details": usage["prompt_tokens_details"],
                      "output_tokens_details": usage["completion_tokens_details"]},
            "timings": end.timings(),
        }  # fmt: skip

    def _grows(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        if item["type"] == "message":
            content = item["content"][0]
            yield self._event("response.output_text.done", **self._place(), content_index=0, text=content["text"],
                              logprobs=[])  # fmt: skip
            yield self._event("response.content_part.done", **self._place(), content_index=0, part=content)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield self._event("response.reasoning_text.done", **self._place(), content_index=0, text=text)
        if "status" in item:
            item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return event_of({"type": kind, "sequence_number": self._number - 1, **data}, kind)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
