"""/v1/responses: OpenAI's newer interface. Nothing is stored: each request holds the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.answers.generation_spec import GenerationSpec, ToolChoiceMode, make_message
from edgespec.answers.response import Started, count_usage, new_id
from edgespec.answers.tools import Tool, format_call, parse_arguments
from edgespec.engine.structure import Structure
from edgespec.errors import InvalidRequest
from edgespec.server.answers import Block, Event, Step, Writer
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
    Said,
    SamplingBody,
    ThinkingBody,
    Tokens,
    join_lines,
    join_text,
    require_fields,
)
from edgespec.server.media import warn_of_media
from edgespec.text.chat_template import Message

_CUTS = {"length": "max_output_tokens", "repetition": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}  # of the ids of items, by kind of block
_CONTENTS: dict[str, tuple[str, dict[str, Any]]] = {  # kind of block -> name of its content's events, their fields
    "text": ("output_text", {"content_index": 0}),
    "reasoning": ("reasoning_text", {"content_index": 0}),
    "call": ("function_call_arguments", {}),
}


class ResponsesWriter(Writer):
    """Writes the answer as one response."""

    def __init__(self, namespaces: Mapping[str, Mapping[str, str]], **fields: Any) -> None:
        """`namespaces` maps the name by which the model knows a function to the function's `name` and `namespace` in
        the request. `fields` of the request are repeated in the response.
        """
        super().__init__()
        self._namespaces = namespaces
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "metadata": {},
            **fields,
        }
        self._numbers = count()  # of events

    def write(self, index: int, step: Step) -> Iterator[Event]:
        match step:
            case Started():
                yield self._event("created", response=self.response_body())
                yield self._event("in_progress", response=self.response_body())
            case "begin", block, _:
                item = self._format_item(block)
                shown = {**item, "content": []} if block.kind == "text" else item
                yield self._item_event("output_item.added", item=shown)
                if block.kind == "text":
                    yield self._item_event("content_part.added", block, content_index=0, part=item["content"][0])
            case "grow", block, text:
                content, fields = _CONTENTS[block.kind]
                scores = self.take_scores(index)
                if block.kind == "text":
                    block.scores += scores
                    fields = {**fields, "logprobs": scores}
                yield self._item_event(f"{content}.delta", block, delta=text, **fields)
            case "close", block, _:
                item, (content, fields) = self._format_item(block), _CONTENTS[block.kind]
                whole: dict[str, Any] = {"text": block.text}
                if block.kind == "text":
                    whole["logprobs"] = block.scores
                if block.kind == "call":
                    whole = {"name": item["name"], "arguments": block.text}
                yield self._item_event(f"{content}.done", block, **whole, **fields)
                if block.kind == "text":
                    yield self._item_event("content_part.done", block, content_index=0, part=item["content"][0])
                yield self._item_event("output_item.done", item=item)

    def finish(self) -> Iterator[Event]:
        response = self.response_body()
        yield self._event(response["status"], response=response)

    def fail(self, error: Event) -> Iterator[Event]:
        """The events `error` and `response.failed`. OpenAI's clients raise an exception for the member `error` of the
        first; the fields beside it are the documented ones.
        """
        reason = error["error"]
        stated = {key: reason[key] for key in ("code", "message", "param")}
        failure = {"code": reason["code"] or "server_error", "message": reason["message"]}
        response = {**self.response_body(), "status": "failed", "error": failure, "output": self._items()}
        yield {"type": "error", "sequence_number": next(self._numbers), **stated, **error}
        yield self._event("failed", response=response)

    def response_body(self) -> dict[str, Any]:
        """The response, which is in progress until the answer has ended."""
        end = self.answers[0].end
        if end is None:
            return {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        usage = count_usage([end])
        cut = _CUTS.get(end.reason)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self._items(),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            },
            **end.extensions(),
        }

    def _items(self) -> list[dict[str, Any]]:
        return list(map(self._format_item, self.answers[0].blocks))

    def _format_item(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            content = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.scores}
            form = {"type": "message", "role": "assistant", "status": block.status, "content": [content]}
        elif block.kind == "reasoning":
            form = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": block.text}]}
        else:
            named = self._namespaces.get(block.name, {"name": block.name})
            call = {"call_id": block.call_id(), **named, "arguments": block.text}
            form = {"type": "function_call", "status": block.status, **call}
        return {"id": _item_id(block), **form}

    def _item_event(self, kind: str, block: Block | None = None, **data: Any) -> Event:
        """An event of the last item. If it has `block`, it names the item's id."""
        head = {} if block is None else {"item_id": _item_id(block)}
        return self._event(kind, **head, output_index=len(self.answers[0].blocks) - 1, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **data}


def _item_id(block: Block) -> str:
    return _PREFIXES[block.kind] + block.id


_WEB_SEARCH = "web_search"
_LOGPROBS = "message.output_text.logprobs"  # in `include`


class InputItem(Body):
    """A message, a call, or the result of a call."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | Parts | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None

    @property
    def reasoning(self) -> str:
        """The text of an item of reasoning, or its summary if a client keeps only that."""
        parts = self.content if isinstance(self.content, list) and self.content else self.summary or []
        return join_lines(part.text for part in parts)


class ResponseTool(Function):
    """A function, or a namespace: functions under one name, as Codex offers its own. The model knows each as
    NAMESPACE__FUNCTION.
    """

    type: str
    name: str = ""
    tools: Annotated[list[ResponseTool], FEW] | None = None

    def tool(self) -> Tool:
        if self.type != "function":
            raise InvalidRequest(
                f"tools of type '{self.type[:100]}' are not supported.", hint="Send tools of type function."
            )
        return super().tool()


class NamedTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]

    def structure(self) -> Structure | None:
        return ResponseFormat(type=self.type, json_schema=self if self.schema_ is not None else None).structure()


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(ThinkingBody, SamplingBody, GenerationBody):
    """The body of /v1/responses."""

    refused = ("background", "conversation", "previous_response_id", "prompt")

    input: str | Annotated[list[InputItem], MANY]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[list[ResponseTool], FEW] | None = None
    tool_choice: ToolChoiceMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: EffortConfig | None = None
    include: Annotated[list[str], FEW] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(
            {
                _qualify(each.name, tool.name): {"name": tool.name, "namespace": each.name}
                for each in self.tools or ()
                for tool in each.tools or ()
            },
            model=self.model,
            instructions=self.instructions,
            parallel_tool_calls=bool(self.parallel_tool_calls),
            temperature=self.temperature,
            top_p=self.top_p,
            tool_choice=self.model_dump(mode="json", include={"tool_choice"})["tool_choice"] or "auto",
            tools=[tool.model_dump(mode="json", exclude_unset=True) for tool in self.tools or ()],
        )

    def generation_spec(self) -> GenerationSpec:
        text_format = self.text.format if self.text is not None else None
        return GenerationSpec(
            prompt=tuple(self._messages()),
            settings=self.settings(),
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            structure=text_format.structure() if text_format is not None else None,
            tools=tuple(self._tools()),
            tool_choice=self.tool_choice if isinstance(self.tool_choice, str) else "auto",
            forced_tool=self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None,
            parallel_calls=self.parallel_tool_calls,
            top_logprobs=(self.top_logprobs or 0) if self.top_logprobs or _LOGPROBS in (self.include or ()) else None,
            draft_max=self.draft_max,
            thinking=self.make_thinking(effort=self.reasoning.effort if self.reasoning is not None else None),
            warnings=(*self._warn_of_tools(), *warn_of_media(self.said())),
        )

    def said(self) -> Iterator[Said]:
        for item in self._items():
            if item.type == "function_call_output":
                yield Said("tool", item.output)
            else:
                yield Said("assistant" if _is_of_assistant(item) else item.role, item.content)

    def _warn_of_tools(self) -> Iterator[str]:
        kinds = dict.fromkeys(each.type for each in self.tools or () if each.type.startswith(_WEB_SEARCH))
        return (f"{kind} is not available." for kind in kinds)

    def _tools(self) -> Iterator[Tool]:
        """The function tools. Raises InvalidRequest for others, except for a web search, which agents always offer."""
        for each in self.tools or ():
            if each.type == "namespace":
                for tool in each.tools or ():
                    made = tool.tool()
                    description = "\n\n".join(filter(None, (made.description, each.description)))
                    yield replace(made, name=_qualify(each.name, made.name), description=description)
            elif not each.type.startswith(_WEB_SEARCH):
                yield each.tool()

    def _messages(self) -> list[Message]:
        """The instructions and leading system texts as one message; the items of a turn of the assistant as one."""
        system, messages = [self.instructions or ""], list[Message]()
        for is_turn, items in groupby(self._items(), _is_of_assistant):
            if is_turn:
                messages += _make_turn([*items])
                continue
            for item in items:
                if item.type == "message" and item.role in ("system", "developer") and not messages:
                    system.append(join_text(item.content))
                else:
                    messages.append(_make_message(item))
        system_text = "\n\n".join(text for text in system if text)
        return [make_message("system", system_text), *messages] if system_text else messages

    def _items(self) -> list[InputItem]:
        return [InputItem(content=self.input)] if isinstance(self.input, str) else self.input


def _is_of_assistant(item: InputItem) -> bool:
    return item.type in ("function_call", "reasoning") or (item.type == "message" and item.role == "assistant")


def _make_turn(items: Sequence[InputItem]) -> list[Message]:
    """Consecutive items of the assistant as one message; none for reasoning without a text.

    A template shows the reasoning of a call in the call's message only, and a strict one refuses two messages of the
    assistant.
    """
    texts = [join_text(item.content) for item in items if item.type == "message"]
    reasoning = join_lines(item.reasoning for item in items if item.type == "reasoning")
    calls = [_format_call(item) for item in items if item.type == "function_call"]
    if not (texts or calls or reasoning):
        return []
    extra = {"tool_calls": calls or None, "reasoning_content": reasoning or None}
    return [make_message("assistant", join_lines(texts), **extra)]


def _format_call(item: InputItem) -> dict[str, Any]:
    require_fields(call_id=item.call_id, name=item.name)
    name = _qualify(item.namespace, item.name) if item.namespace else item.name
    return format_call(item.call_id, name, parse_arguments(item.arguments or "{}"))


def _make_message(item: InputItem) -> Message:
    """An item of anyone but the assistant. Raises InvalidRequest."""
    if item.type == "message":
        return make_message("system" if item.role == "developer" else item.role, join_text(item.content))
    if item.type == "function_call_output":
        require_fields(call_id=item.call_id)
        return make_message("tool", join_text(item.output), tool_call_id=item.call_id)
    raise InvalidRequest(f"input items of type '{item.type[:100]}' are not supported.", hint="Remove the item.")


def _qualify(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"
