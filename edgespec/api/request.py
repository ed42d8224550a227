"""Turns a prompt and keyword arguments into a request of the engine, and into the reader of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from edgespec.answers.generation_spec import GenerationSpec, ToolChoiceMode, make_message
from edgespec.answers.response import ResponseStream
from edgespec.answers.tools import Tool, make_tool, parse_arguments
from edgespec.api.options import GenerationArguments, require_known, resolve_sampling
from edgespec.engine.events import MemoryUse, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.structure import json_structure
from edgespec.errors import InvalidRequest
from edgespec.text.chat_template import Message

Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Messages


def prepare(
    function: str, prompt: Prompt, arguments: GenerationArguments, model_info: ModelInfo
) -> tuple[Request, ResponseStream]:
    """The request, and what reads its answer. Raises InvalidRequest for a value that cannot work, TypeError for an
    argument that does not exist.
    """
    require_known(function, arguments, GenerationArguments.__annotations__)
    max_tokens = arguments.get("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}.")
    choice = arguments.get("tool_choice") or "auto"
    is_name = choice not in ("auto", "none", "required")
    schema = arguments.get("schema")
    spec = GenerationSpec(
        prompt=_build_prompt(prompt, arguments.get("system")),
        max_tokens=max_tokens,
        seed=arguments.get("seed"),
        stop=_list_stops(arguments.get("stop")),
        structure=None if schema is None else json_structure(dict(schema), is_strict=True),
        tools=tuple(_build_tool(each) for each in arguments.get("tools") or ()),
        tool_choice="auto" if is_name else cast("ToolChoiceMode", choice),
        forced_tool=choice if is_name else None,
        parallel_calls=arguments.get("parallel_tool_calls"),
        variables=arguments.get("template_variables") or {},
        memory=MemoryUse(source=arguments.get("memory_source")),
    )
    request = spec.build_request(model_info, token_limit=model_info.context_size)
    request = replace(request, sampling=resolve_sampling(arguments, model_info.sampling))
    return request, spec.make_response(model_info)


def _list_stops(stop: object) -> tuple[str, ...]:
    """The stop texts of an argument, which is None, one or several. Raises InvalidRequest."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
        raise InvalidRequest(f"stop is a text or a list of texts, not {stop!r}.", hint="Write stop='END', for example.")
    return tuple(stops)


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
        extra["tool_calls"] = [_parse_call(call) for call in (calls if isinstance(calls, Sequence) else [calls])]
    return make_message(role, content or "", **extra)


def _parse_call(call: Any) -> dict[str, Any]:
    """A call with its arguments as templates expect them: as an object. Raises InvalidRequest."""
    given = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            "a tool call of a message has a function.",
            hint='Give {"type": "function", "function": {"name": "...", "arguments": "{}"}}.',
        )
    function = dict(given)
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
