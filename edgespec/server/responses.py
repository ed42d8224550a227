"""/v1/responses: OpenAI's newer interface. Nothing is stored: each request holds the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.engine.structured_output import Structure
from edgespec.errors import InvalidRequest
from edgespec.server.fields import (
    FEW,
    MANY,
    Body,
    EffortConfig,
    Function,
    GenerationBody,
    JsonSchema,
    Parts,
    ResponseFormat,
    ThinkingBody,
    Tokens,
    TopP,
    Writer,
    join_text,
    refuse_fields,
)
from edgespec.service.generation_spec import (
    GenerationSpec,
    Settings,
    Tool,
    ToolChoiceMode,
    format_call,
    make_message,
    parse_arguments,
)
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, count_usage, new_id
from edgespec.text.chat_template import Message
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart

# The answers of /v1/responses: the response, and the events of its stream.


class ResponsesWriter(Writer):
    """One response."""

    def __init__(self, namespaces: Mapping[str, Mapping[str, str]], **fields: Any) -> None:
        """`namespaces`: from a function's name for the model to its `name` and `namespace`. `fields` of the request are
        repeated in the response.
        """
        self._namespaces = namespaces
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "metadata": {},
            **fields,
        }
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may still grow
        self._n_events = 0
        self._end: Done | None = None

    def response_body(self) -> dict[str, Any]:
        list(self._close())
        return self._response()

    def events(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case Started():
                yield self._event("response.created", response=self._response())
                yield self._event("response.in_progress", response=self._response())
            case TextDelta(text):
                if not self._grows("message"):
                    yield from self._begin_message()
                self._items[-1]["content"][0]["text"] += text
                yield self._content_event("output_text.delta", delta=text, logprobs=[])
            case ReasoningDelta(text):
                if not self._grows("reasoning"):
                    content = [{"type": "reasoning_text", "text": ""}]
                    item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content}
                    yield from self._begin(item)
                self._items[-1]["content"][0]["text"] += text
                yield self._content_event("reasoning_text.delta", delta=text)
            case CallStart(name=name):
                named = self._namespaces.get(name, {"name": name})
                item = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"), **named}
                yield from self._begin({**item, "arguments": "", "status": "in_progress"})
            case CallDelta(arguments=arguments):
                self._items[-1]["arguments"] += arguments
                yield self._item_event("function_call_arguments.delta", delta=arguments)
            case CallEnd(is_cut=is_cut):
                yield from self._close(is_cut=is_cut)
            case Done():
                self._end = part

    def finish(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An error event and response.failed. `error` inside of the first is what OpenAI's clients raise an exception
        for; the fields beside it are the documented ones.
        """
        reason = error["error"]
        stated = {key: reason[key] for key in ("code", "message", "param")}
        failure = {"code": reason["code"] or "server_error", "message": reason["message"]}
        response = {**self._response(), "status": "failed", "error": failure, "output": self._items}
        yield self._event("error", **stated, **error)
        yield self._event("response.failed", response=response)

    def _response(self) -> dict[str, Any]:
        end = self._end
        if end is None:
            return {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        usage = count_usage([end])
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(end.reason)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            },
            **end.extensions(),
        }

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": "in_progress", "content": []}
        yield from self._begin(item)
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(content)
        yield self._content_event("content_part.added", part=content)

    def _grows(self, kind: str) -> bool:
        """Whether the last item is of this type and may still grow."""
        return self._is_open and self._items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._items.append(item)
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """End the last item, unless it has ended. `is_cut`: it is not complete."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "message":
            content = item["content"][0]
            yield self._content_event("output_text.done", text=content["text"], logprobs=[])
            yield self._content_event("content_part.done", part=content)
        elif item["type"] == "reasoning":
            yield self._content_event("reasoning_text.done", text=item["content"][0]["text"])
        else:
            call = {key: item[key] for key in ("name", "arguments")}
            yield self._item_event("function_call_arguments.done", **call)
        if "status" in item:
            item["status"] = "incomplete" if is_cut else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _content_event(self, kind: str, **data: Any) -> dict[str, Any]:
        """An event of the last item's content."""
        return self._item_event(kind, content_index=0, **data)

    def _item_event(self, kind: str, **data: Any) -> dict[str, Any]:
        """An event of the last item."""
        item = self._items[-1]
        return self._event(f"response.{kind}", item_id=item["id"], output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, **data: Any) -> dict[str, Any]:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **data}


_WEB_SEARCH = "web_search"


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"


class InputResult(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class OtherItem(Body):
    type: str


class ResponseTool(Function):
    type: Literal["function"]


class Namespace(Body):
    """Functions under one name, as Codex offers its own. The model knows each as NAMESPACE__FUNCTION."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[ResponseTool | OtherItem], FEW]


class NamedTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]

    def structure(self) -> Structure | None:
        return ResponseFormat(type=self.type, json_schema=self if self.schema_ is not None else None).structure()


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(GenerationBody, ThinkingBody):
    """The body of /v1/responses."""

    input: str | Annotated[list[InputMessage | InputCall | InputResult | OtherItem], MANY]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    tools: Annotated[list[ResponseTool | Namespace | OtherItem], FEW] | None = None
    tool_choice: ToolChoiceMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: EffortConfig | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(
            {
                _qualify(each.name, tool.name): {"name": tool.name, "namespace": each.name}
                for each, tool in self._namespaced()
                if isinstance(tool, ResponseTool)
            },
            model=self.model,
            instructions=self.instructions,
            parallel_tool_calls=bool(self.parallel_tool_calls),
            temperature=self.temperature,
            top_p=self.top_p,
            tool_choice=self.model_dump(mode="json", include={"tool_choice"})["tool_choice"] or "auto",
            tools=[tool.model_dump(mode="json") for tool in self.tools or ()],
        )

    def generation_spec(self) -> GenerationSpec:
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "previous_response_id is not supported: responses are not stored.",
                hint="Send the whole conversation as input.",
            )
        refuse_fields(self, "background", "conversation", "prompt")
        text_format = self.text.format if self.text is not None else None
        return GenerationSpec(
            prompt=tuple(self._messages()),
            settings=Settings(self.temperature, self.top_p),
            max_tokens=self.max_output_tokens,
            structure=text_format.structure() if text_format is not None else None,
            tools=tuple(self._tools()),
            tool_choice=self.tool_choice if isinstance(self.tool_choice, str) else "auto",
            forced_tool=self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None,
            parallel_calls=self.parallel_tool_calls,
            draft_length=self.draft_length(),
            thinking=self.make_thinking(effort=self.reasoning.effort if self.reasoning is not None else None),
            warnings=tuple({f"{each.type} is not available.": 0 for each in self.tools or () if _is_search(each)}),
        )

    def _tools(self) -> Iterator[Tool]:
        """The function tools. Raises InvalidRequest for others, except for a web search, which agents always offer."""
        for tool in self.tools or ():
            if not isinstance(tool, Namespace) and not _is_search(tool):
                yield _make_tool(tool)
        for namespace, tool in self._namespaced():
            made = _make_tool(tool)
            description = "\n\n".join(filter(None, (made.description, namespace.description)))
            yield replace(made, name=_qualify(namespace.name, made.name), description=description)

    def _namespaced(self) -> Iterator[tuple[Namespace, ResponseTool | OtherItem]]:
        for each in self.tools or ():
            if isinstance(each, Namespace):
                yield from ((each, tool) for tool in each.tools)

    def _messages(self) -> list[Message]:
        """The instructions and leading system texts as one message; consecutive calls as one assistant message."""
        system, messages, calls = [self.instructions or ""], list[Message](), list[dict[str, Any]]()
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputCall):
                if calls:
                    messages.pop()
                name = _qualify(item.namespace, item.name) if item.namespace else item.name
                calls.append(format_call(item.call_id, name, parse_arguments(item.arguments)))
                messages.append(make_message("assistant", "", tool_calls=calls))
                continue
            calls = []
            if isinstance(item, InputMessage):
                role = "system" if item.role == "developer" else item.role
                if role == "system" and not messages:
                    system.append(join_text(item.content))
                else:
                    messages.append(make_message(role, join_text(item.content)))
            elif isinstance(item, InputResult):
                messages.append(make_message("tool", join_text(item.output), tool_call_id=item.call_id))
            elif item.type != "reasoning":
                raise InvalidRequest(f"input items of type '{item.type}' are not supported.", hint="Remove the item.")
        system_text = "\n\n".join(text for text in system if text)
        return [make_message("system", system_text), *messages] if system_text else messages


def _make_tool(tool: ResponseTool | OtherItem) -> Tool:
    if not isinstance(tool, ResponseTool):
        raise InvalidRequest(
            f"tools of type '{tool.type[:100]}' are not supported.", hint="Send tools of type function."
        )
    return tool.tool()


def _is_search(tool: Body) -> bool:
    return isinstance(tool, OtherItem) and tool.type.startswith(_WEB_SEARCH)


def _qualify(namespace: str, name: str) -> str:
    """The name of a function for the model."""
    return f"{namespace}__{name}"
