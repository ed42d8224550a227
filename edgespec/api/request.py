"""From a prompt and keyword arguments to a request of the engine, and to the reader of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from edgespec.api.options import GenerationArguments, require_known, resolve_sampling
from edgespec.engine.events import MemoryUse, Request
from edgespec.engine.structured_output import json_structure
from edgespec.errors import InvalidRequest
from edgespec.service.client import ModelInfo
from edgespec.service.generation_spec import GenerationSpec, ToolChoiceMode, make_message, parse_arguments
from edgespec.service.response import ResponseStream
from edgespec.service.tools import Tool, make_tool
from edgespec.text.chat_template import Message

Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Messages


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request and its output parser."""

    request: Request
    response: ResponseStream


def prepare(function: str, prompt: Prompt, arguments: GenerationArguments, model_info: ModelInfo) -> PreparedRequest:
    """Raises InvalidRequest for a value that cannot work, TypeError for an argument that does not exist."""
    require_known(function, arguments, GenerationArguments.__annotations__)
    max_tokens = arguments.get("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}.", hint="Give a larger number.")
    choice = arguments.get("tool_choice") or "auto"
    is_name = choice not in ("auto", "none", "required")
    stop = arguments.get("stop") or ()
    schema = arguments.get("schema")
    spec = GenerationSpec(
        prompt=_build_prompt(prompt, arguments.get("system")),
        max_tokens=max_tokens,
        seed=arguments.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        structure=None if schema is None else json_structure(dict(schema), is_strict=True),
        tools=tuple(_build_tool(each) for each in arguments.get("tools") or ()),
        tool_choice="auto" if is_name else cast("ToolChoiceMode", choice),
        forced_tool=choice if is_name else None,
        parallel_calls=arguments.get("parallel_tool_calls"),
        variables=arguments.get("template_variables") or {},
        memory=MemoryUse(source=arguments.get("memory_source")),
    )
    request = spec.build_request(model_info, token_limit=model_info.context_size)
    return PreparedRequest(
        replace(request, sampling=resolve_sampling(arguments, model_info.sampling)), spec.make_response(model_info)
    )


def _build_prompt(prompt: Prompt, system: str | None) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        if system is not None:
            raise InvalidRequest("a system message needs messages.", hint="Use chat().")
        return prompt
    first = () if system is None else (Message("system", system),)
    return (*first, *(each if isinstance(each, Message) else _build_message(each) for each in prompt))


def _build_message(value: Mapping[str, Any]) -> Message:
    extra = dict(value)
    role, content = extra.pop("role", None), extra.pop("content", None)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise InvalidRequest("a message has a role and a text.", hint='Give {"role": "user", "content": "..."}.')
    if calls := extra.get("tool_calls"):
        extra["tool_calls"] = [_parse_call(call) for call in calls]
    return make_message(role, content or "", **extra)


def _parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as templates expect them: as an object."""
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        function["arguments"] = parse_arguments(function["arguments"])
    return {**call, "function": function}


def _build_tool(value: Mapping[str, Any]) -> Tool:
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest(
            "a tool has a function with a name.",
            hint='Give {"type": "function", "function": {"name": "...", "parameters": {...}}}.',
        )
    return make_tool(name, function.get("description"), function.get("parameters"))
