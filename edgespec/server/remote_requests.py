"""What another server is asked for a request: OpenAI's chat or completions, whatever interface the request came by.

A request by one of these two is passed on with the fields that it came with; others are written anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.engine.events import Gap
from edgespec.engine.structured_output import Json, Structure
from edgespec.errors import InvalidRequest
from edgespec.server.completions import CompletionRequest
from edgespec.server.fields import NO_LIMIT
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import new_id
from edgespec.service.thinking import Thinking
from edgespec.text.chat_template import Message

CHAT, TEXT = "/chat/completions", "/completions"
EDGESPEC, LLAMA_SERVER, VLLM, SGLANG = "edgespec", "llamacpp", "vllm", "sglang"
"""What servers call themselves in `owned_by` of their models."""
_HAVE_TEMPLATES = frozenset({EDGESPEC, LLAMA_SERVER, VLLM, SGLANG})
_CONTINUE = frozenset({EDGESPEC, VLLM, SGLANG})  # by fields; llama-server continues without them
_OPENAI = frozenset({"openai", "openai-internal", "system"})
_BUDGETS = {EDGESPEC: "reasoning_budget_tokens", LLAMA_SERVER: "reasoning_budget_tokens", VLLM: "thinking_token_budget"}
_OWN = ("draft_max", "draft_min", "memory")
_HERE = ("keep_alive", "ttl", "n", "stream", "stream_options")  # what this server does itself
_LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A request for one answer: the path after /v1, the body without the name of the model, and what of it is not
    followed, in sentences.
    """

    path: str
    body: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def make_body(self, model: str, copy: int) -> dict[str, Any]:
        """The body for `model`, streamed. `copy` numbers the answers to one prompt: each has a seed of its own."""
        body = {**self.body, "model": model, "stream": True, "stream_options": {"include_usage": True}}
        if copy and body.get("seed") is not None:
            body["seed"] = (body["seed"] + copy) % 2**32
        return body


def pass_chat(raw: bytes, owner: str, *, remembers: bool) -> RemoteCall:
    """The call for the body of a ChatRequest. `owner`: the `owned_by` of the model. `remembers`: whether another
    edgespec may keep the texts.
    """
    fields = json.loads(raw)
    return RemoteCall(CHAT, _pass_fields(fields, owner, remembers=remembers), _warn_of_drafting(fields, owner))


def pass_completions(request: CompletionRequest, raw: bytes, owner: str, *, remembers: bool) -> list[RemoteCall]:
    """The calls for the body of a CompletionRequest, one for each prompt. Raises InvalidRequest."""
    if request.echo and (request.logprobs is not None or not all(isinstance(each, str) for each in request.prompts())):
        raise InvalidRequest(
            "echo with logprobs or token ids needs a model of this server.", hint="Remove echo, or name another model."
        )
    given = json.loads(raw)
    fields, warnings = _pass_fields(given, owner, remembers=remembers), _warn_of_drafting(given, owner)
    fields.pop("echo", None)  # this server writes it
    return [RemoteCall(TEXT, {**fields, "prompt": prompt}, warnings) for prompt in request.prompts()]


def translate(spec: GenerationSpec, owner: str, *, remembers: bool) -> RemoteCall:
    """The call for a request by another interface."""
    fields: dict[str, Any] = {name: value for name, value in asdict(spec.settings).items() if value is not None}
    if owner == LLAMA_SERVER and "repetition_penalty" in fields:
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
    if spec.max_tokens is not None and spec.max_tokens < NO_LIMIT:
        fields["max_completion_tokens" if owner in _OPENAI else "max_tokens"] = spec.max_tokens
    fields |= {"seed": spec.seed} if spec.seed is not None else {}
    fields |= {"stop": list(spec.stop)} if spec.stop else {}
    fields |= _format_structure(spec.structure) if spec.structure is not None else {}
    drafting = {"draft_max": spec.draft_length.longest, "draft_min": spec.draft_length.shortest or None}
    fields |= {name: value for name, value in drafting.items() if value is not None} if owner == EDGESPEC else {}
    fields |= {"memory": remembers} if owner == EDGESPEC else {}
    warnings = (*spec.warnings, *_warn_of_drafting(drafting, owner))
    if isinstance(spec.prompt, tuple):
        fields |= {"messages": list(_format_messages(spec.prompt))}
        fields |= _format_tools(spec) | _format_thinking(spec.thinking, owner)
        if spec.start is not None:
            fields["messages"].append({"role": "assistant", "content": spec.start.text})
            fields |= {"continue_final_message": True, "add_generation_prompt": False} if owner in _CONTINUE else {}
        return RemoteCall(CHAT, fields, (*warnings, *_warn_of_thinking(spec.thinking, owner)))
    if isinstance(spec.prompt, Gap):
        return RemoteCall(TEXT, {**fields, "prompt": spec.prompt.before, "suffix": spec.prompt.after}, warnings)
    return RemoteCall(TEXT, {**fields, "prompt": spec.prompt}, warnings)


def _pass_fields(fields: dict[str, Any], owner: str, *, remembers: bool) -> dict[str, Any]:
    """The fields of a body without those that concern this server, or that the other one does not know."""
    unknown = (*_HERE, *(() if owner == EDGESPEC else _OWN))
    kept = {name: value for name, value in fields.items() if name not in unknown}
    kept = {name: value for name, value in kept.items() if not (name in _LIMITS and value == -1)}
    return {**kept, "memory": False} if owner == EDGESPEC and not remembers else kept


def _warn_of_drafting(fields: Mapping[str, Any], owner: str) -> tuple[str, ...]:
    ignored = [name for name in ("draft_max", "draft_min") if fields.get(name) is not None]
    return (
        () if owner == EDGESPEC else tuple(f"{name} is ignored: the other server is no edgespec." for name in ignored)
    )


def _warn_of_thinking(thinking: Thinking, owner: str) -> tuple[str, ...]:
    lost = {
        "switch": thinking.is_on is not None and owner not in _HAVE_TEMPLATES,
        "budget": thinking.budget is not None and owner not in _BUDGETS,
    }
    return tuple(
        f"the {name} of the reasoning is ignored: the other server may refuse it." for name in lost if lost[name]
    )


def _format_messages(messages: tuple[Message, ...]) -> Iterator[dict[str, Any]]:
    """Messages with arguments as text and with ids of calls, which Ollama's interface does not have."""
    open_ids: list[str] = []
    for message in messages:
        out = message.as_dict()
        if calls := out.get("tool_calls"):
            out["tool_calls"] = [_format_call(call) for call in calls]
            open_ids = [call["id"] for call in out["tool_calls"]]
        if message.role == "tool":
            given = out.get("tool_call_id")
            out["tool_call_id"] = given or (open_ids[0] if open_ids else new_id("call_"))
            open_ids = [each for each in open_ids if each != out["tool_call_id"]]
        yield out


def _format_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**call, "id": call["id"] or new_id("call_"), "function": {**function, "arguments": text}}


def _format_tools(spec: GenerationSpec) -> dict[str, Any]:
    """The fields of tools. Those of a request without any are left out."""
    if not spec.tools:
        return {}
    tools = []
    for tool in spec.tools:
        described = tool.to_dict()
        described["function"] |= {"strict": True} if tool.is_strict else {}
        tools.append(described)
    forced = {"type": "function", "function": {"name": spec.forced_tool}}
    fields: dict[str, Any] = {"tools": tools, "tool_choice": forced if spec.forced_tool else spec.tool_choice}
    return fields if spec.parallel_calls is None else {**fields, "parallel_tool_calls": spec.parallel_calls}


def _format_structure(structure: Structure) -> dict[str, Any]:
    """The response_format of JSON, the only structure that interfaces other than OpenAI's older ones demand."""
    ((part,),) = structure.alternatives
    assert isinstance(part, Json)
    schema = json.loads(part.schema)
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)
    if schema == {"type": "object"}:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _format_thinking(thinking: Thinking, owner: str) -> dict[str, Any]:
    """The fields of the reasoning. The switch and the budget are for servers that have them: OpenAI refuses others."""
    fields: dict[str, Any] = {} if thinking.effort is None else {"reasoning_effort": thinking.effort}
    if thinking.is_on is not None and owner in _HAVE_TEMPLATES:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking.is_on}
    if thinking.budget is not None and owner in _BUDGETS:
        fields[_BUDGETS[owner]] = thinking.budget
    return fields
