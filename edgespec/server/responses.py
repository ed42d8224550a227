"""/v1/responses: OpenAI's newer interface. Nothing is stored: each request holds the whole conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.engine.structured_output import Structure
from edgespec.errors import InvalidRequest
from edgespec.server.control_fields import DraftingBody, EffortConfig, ThinkingBody
from edgespec.server.fields import (
    FEW,
    MANY,
    AnyModelName,
    Body,
    JsonSchema,
    Parts,
    ResponseFormat,
    Tokens,
    join_text,
    refuse_fields,
)
from edgespec.server.residency import ResidencyBody
from edgespec.server.responses_events import ResponsesWriter
from edgespec.service.generation_spec import GenerationSpec, Settings, ToolChoiceMode, make_message, parse_arguments
from edgespec.service.tools import Tool, format_call, make_tool
from edgespec.text.chat_template import Message

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


class ResponseTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(Body):
    """Functions under one name, as Codex offers its own. The model knows each as NAMESPACE__FUNCTION."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[ResponseTool | OtherItem], FEW]


class NamedTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def structure(self) -> Structure | None:
        """Raises InvalidRequest."""
        schema = JsonSchema(schema=self.schema_, strict=self.strict) if self.schema_ is not None else None
        return ResponseFormat(type=self.type, json_schema=schema).structure()


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(DraftingBody, ResidencyBody, ThinkingBody):
    """The body of /v1/responses."""

    model: AnyModelName = ""
    input: str | Annotated[list[InputMessage | InputCall | InputResult | OtherItem], MANY]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[ResponseTool | Namespace | OtherItem], FEW] | None = None
    tool_choice: ToolChoiceMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: EffortConfig | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    stream: bool | None = False
    n: Literal[1] = 1

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

    def generation_specs(self) -> list[GenerationSpec]:
        """Raises InvalidRequest."""
        return [self.generation_spec()]

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
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
    """Raises InvalidRequest."""
    if not isinstance(tool, ResponseTool):
        raise InvalidRequest(
            f"tools of type '{tool.type[:100]}' are not supported.", hint="Send tools of type function."
        )
    return make_tool(tool.name, tool.description, tool.parameters, is_strict=bool(tool.strict))


def _is_search(tool: Body) -> bool:
    return isinstance(tool, OtherItem) and tool.type.startswith(_WEB_SEARCH)


def _qualify(namespace: str, name: str) -> str:
    """The name of a function for the model."""
    return f"{namespace}__{name}"
