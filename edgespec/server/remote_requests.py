"""What another server is asked for a request: OpenAI's chat or completions, whatever interface the request came by.

A request by one of these two is passed on with the fields that it came with; others are written anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Finished, Gap, Scored
from edgespec.engine.structured_output import Json, Structure
from edgespec.errors import InvalidRequest
from edgespec.server.fields import NO_LIMIT
from edgespec.server.openai import CompletionRequest
from edgespec.service.generation_spec import GenerationSpec, Thinking
from edgespec.service.response import Done, Ending, Part, ReasoningDelta, Started, TextDelta, new_id
from edgespec.text.chat_template import Message
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart, ToolCall

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


# RemoteAnswer: the events of another server's stream as parts of an answer, and what it reports of usage and speed.


_ENDINGS: dict[str, Ending] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_LARGE = 10**12
_REPORTED = {"usage": dict, "timings": dict, "warnings": list}


class RemoteAnswer:
    """One answer as it arrives. `parts` takes each event of the stream, `finish` follows the last."""

    def __init__(self, warnings: tuple[str, ...]) -> None:
        """`warnings`: what of the request is not followed, in sentences."""
        self._warnings = warnings
        self._began_s = monotonic()
        self._first_s: float | None = None  # when the first and the last text came
        self._last_s = 0.0
        self._n_events = 0  # with text
        self._call: CallStart | None = None  # the one that is open
        self._arguments = ""
        self._call_key: object = None
        self._n_calls = 0
        self._reason: str | None = None
        self._stop: str | None = None
        self._reported: dict[str, Any] = {}

    @property
    def has_text(self) -> bool:
        """Whether anything of the answer has arrived."""
        return self._first_s is not None

    @property
    def is_whole(self) -> bool:
        """Whether the server has said why the answer ended."""
        return self._reason is not None

    def parts(self, event: Mapping[str, Any]) -> Iterator[Part]:
        """The parts in an event of /v1/chat/completions or /v1/completions, or in a whole answer."""
        for name, kind in _REPORTED.items():
            if isinstance(event.get(name), kind) and event[name]:
                self._reported[name] = event[name]
        for choice in event.get("choices") or ():
            found = list(self._read_choice(choice))
            if found:
                self._last_s = monotonic()
                if self._first_s is None:
                    self._first_s = self._last_s
                    yield Started(0, 0)  # the counts come with the end
                self._n_events += 1
                yield from found

    def cut(self) -> None:
        """The time of the answer is over."""
        self._reason = "length"

    def finish(self) -> Iterator[Part]:
        """The last parts."""
        reason: Ending = _ENDINGS.get(self._reason or "", "stop")
        if reason == "stop" and self._n_calls:
            reason = "tool_calls"  # which some servers call a stop
        yield from self._end_call(is_cut=reason == "length")
        if not self.has_text:
            yield Started(0, 0)
        metrics = self._measure()
        noted = (*self._warnings, *(str(each) for each in self._reported.get("warnings", ())))
        if "usage" not in self._reported:
            noted = (*noted, "the other server reports no usage: the tokens are the events of its stream.")
        yield Done(reason, self._stop, metrics, None, noted, self._format_timings(metrics))

    def summarize(self) -> Finished:
        """What is counted of the answer, also of one that was left or that failed."""
        reason: FinishReason = "cancelled" if self._reason is None else "length" if self._reason == "length" else "stop"
        return Finished(reason, (), 0, self._measure(), self._stop)

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Part]:
        delta = choice.get("delta") or choice.get("message") or {}
        yield from _read_scores(choice.get("logprobs") or {})
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningDelta(str(text))
        if text := delta.get("content") or delta.get("refusal") or choice.get("text"):
            yield from self._end_call()
            yield TextDelta(str(text))
        if isinstance(called := delta.get("function_call"), dict):  # of OpenAI's first form of tools
            yield from self._read_call("function", called)
        for number, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._read_call(call.get("index", number), call.get("function") or {})
        if reason := choice.get("finish_reason"):
            self._reason = str(reason)
            stop = choice.get("stop_reason")  # vLLM's: the stop string
            self._stop = stop if isinstance(stop, str) else None

    def _read_call(self, key: object, function: Mapping[str, Any]) -> Iterator[Part]:
        """A part of the call with this key."""
        if self._call is None or key != self._call_key:
            yield from self._end_call()
            self._call, self._call_key = CallStart(self._n_calls, str(function.get("name") or "")), key
            self._n_calls += 1
            yield self._call
        if arguments := function.get("arguments"):
            self._arguments += str(arguments)
            yield CallDelta(self._call.index, str(arguments))

    def _end_call(self, *, is_cut: bool = False) -> Iterator[Part]:
        if self._call is not None:
            yield CallEnd(self._call.index, ToolCall(self._call.name, self._arguments), is_cut)
            self._call, self._arguments = None, ""

    def _measure(self) -> Metrics:
        """Counts as they were reported; times as they were, else as the answer arrived here."""
        usage, timings = self._reported.get("usage", {}), self._reported.get("timings", {})
        emitted = _count(usage, "completion_tokens", self._n_events)
        drafted, accepted = _count(timings, "draft_n"), _count(timings, "draft_n_accepted")
        tau = _number(timings, "tau")
        forwards = round((emitted - 1) / tau) if tau and emitted else max(0, emitted - 1 - accepted) if drafted else 0
        speed = _number(timings, "predicted_per_second")
        arrived_s = self._last_s - (self._first_s or 0.0)
        tpot_s = 1 / speed if speed else arrived_s / (emitted - 1) if emitted > 1 and arrived_s else None
        ttft_s = self._first_s - self._began_s if self._first_s is not None else None
        prompt_ms = _number(timings, "prompt_ms")
        return Metrics(
            prompt_tokens=_count(usage, "prompt_tokens"),
            emitted_tokens=emitted,
            target_forwards=forwards,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            tau=tau or ((emitted - 1) / forwards if forwards else None),
            acceptance_rate=accepted / drafted if drafted else None,
            alpha_by_depth=(),
            tokens_per_second=1 / tpot_s if tpot_s else None,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            step_p50_s=None,
            step_p99_s=None,
            prefill_s=min(ttft_s or 0.0, float("inf") if prompt_ms is None else prompt_ms / 1000),
            draft_s=0.0,
            verify_s=0.0,
            sample_s=0.0,
            commit_s=0.0,
            times_plain=_number(timings, "times_plain"),
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens", _count(timings, "cache_n")),
            reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
        )

    def _format_timings(self, metrics: Metrics) -> dict[str, Any]:
        """The timings that were reported; without them, the speed at which the answer arrived."""
        if reported := self._reported.get("timings"):
            return dict(reported)
        speed = {} if metrics.tokens_per_second is None else {"predicted_per_second": metrics.tokens_per_second}
        return {"prompt_n": metrics.prompt_tokens, "predicted_n": metrics.emitted_tokens, **speed}


def _read_scores(logprobs: Mapping[str, Any]) -> Iterator[Scored]:
    """The scored tokens of a choice, in the form of the chat or of the completions."""
    for each in logprobs.get("content") or ():
        top = tuple((_token_bytes(other), float(other["logprob"])) for other in each.get("top_logprobs") or ())
        yield Scored(_token_bytes(each), float(each["logprob"]), top)
    tops = logprobs.get("top_logprobs") or ()
    pairs = zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=False)
    for number, (token, logprob) in enumerate(pairs):
        ranked = tops[number] if number < len(tops) and tops[number] else {}
        yield Scored(token.encode(), float(logprob or 0.0), tuple((text.encode(), by) for text, by in ranked.items()))


def _token_bytes(token: Mapping[str, Any]) -> bytes:
    given = token.get("bytes")
    return bytes(given) if isinstance(given, list) else str(token["token"]).encode()


def _count(values: Any, name: str, default: int = 0) -> int:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, int) and 0 <= value < _LARGE else default


def _number(values: Any, name: str) -> float | None:
    """A time, a rate or tau; None where it is none that can be."""
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) and 1 / _LARGE < value < _LARGE else None
