"""Models of other servers: what these are asked, how their answers are read, and whether they can be reached."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Finished, Gap, Scored
from edgespec.engine.prompts import Embedding
from edgespec.engine.structured_output import Json, Structure
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.server.fields import NO_LIMIT
from edgespec.server.http import HttpError, Policy
from edgespec.server.metrics import ServerMetrics
from edgespec.server.openai import ChatRequest, CompletionRequest
from edgespec.server.record import request_context
from edgespec.server.remote_client import (
    CHECK_URL,
    RemoteClient,
    RemoteFailure,
    RemoteModel,
    RemoteRefusal,
    Unreachable,
)
from edgespec.server.slots import Answer, Slot, Turn
from edgespec.service.generation_spec import GenerationSpec, Thinking
from edgespec.service.response import Done, Ending, Part, ReasoningDelta, Started, TextDelta, merge_deltas, new_id
from edgespec.text.chat_template import Message
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart, ToolCall

# What another server is asked for a request: OpenAI's chat or completions, whatever interface the request came by.
#
# A request by one of these two is passed on with the fields that it came with; others are written anew.


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
    longest = spec.max_tokens if spec.max_tokens != NO_LIMIT else None
    drafting = {"draft_max": spec.draft_length.longest, "draft_min": spec.draft_length.shortest or None}
    fields: dict[str, Any] = {
        **spec.settings,
        "max_completion_tokens" if owner in _OPENAI else "max_tokens": longest,
        "seed": spec.seed,
        "stop": list(spec.stop) or None,
        **(_format_structure(spec.structure) if spec.structure is not None else {}),
        **({**drafting, "memory": remembers} if owner == EDGESPEC else {}),
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if owner == LLAMA_SERVER and "repetition_penalty" in fields:
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
    warnings = (*spec.warnings, *_warn_of_drafting(drafting, owner))
    if isinstance(spec.prompt, Gap):
        return RemoteCall(TEXT, {**fields, "prompt": spec.prompt.before, "suffix": spec.prompt.after}, warnings)
    if not isinstance(spec.prompt, tuple):
        return RemoteCall(TEXT, {**fields, "prompt": spec.prompt}, warnings)
    fields |= {"messages": list(_format_messages(spec.prompt))}
    fields |= _format_tools(spec) | _format_thinking(spec.thinking, owner)
    if spec.start is not None:
        fields["messages"].append({"role": "assistant", "content": spec.start.text})
        fields |= {"continue_final_message": True, "add_generation_prompt": False} if owner in _CONTINUE else {}
    return RemoteCall(CHAT, fields, (*warnings, *_warn_of_thinking(spec.thinking, owner)))


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
        self.reason: str | None = None  # why the answer ended, where that is known
        self._stop: str | None = None
        self._reported: dict[str, Any] = {}

    @property
    def has_text(self) -> bool:
        """Whether anything of the answer has arrived."""
        return self._first_s is not None

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

    def finish(self) -> Iterator[Part]:
        """The last parts."""
        reason: Ending = _ENDINGS.get(self.reason or "", "stop")
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
        reason: FinishReason = "cancelled" if self.reason is None else "length" if self.reason == "length" else "stop"
        return Finished(reason, (), 0, self._measure(), self._stop)

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Part]:
        delta = choice.get("delta") or choice.get("message") or {}
        yield from _read_scores(choice.get("logprobs") or {})
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._end_call()
            yield ReasoningDelta(str(text))
        if text := delta.get("content") or delta.get("refusal") or choice.get("text"):
            yield from self._end_call()
            yield TextDelta(str(text))
        if isinstance(called := delta.get("function_call"), dict):  # of OpenAI's first form of tools
            yield from self._read_call("function", called)
        for number, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._read_call(call.get("index", number), call.get("function") or {})
        if reason := choice.get("finish_reason"):
            self.reason = str(reason)
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


# RemoteSlot: a model of another server, its queue of requests, and whether that server can be reached.


_LOOK_EVERY_S = 30.0
_LOOK_S = 15.0
_COUNT_S = 30.0
_CONTEXTS = ("context_length", "max_model_len", "context_window", "max_context_length")
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What values raise that are not of the form of OpenAI's interface."""
_LOG = logging.getLogger("edgespec.server")


class RemoteSlot(Slot):
    """A model of another server and its queue of requests.

    is_reachable  whether that server can be reached; None before the first attempt
    failure       why it was of no use the last time; None where it was
    owner         what it calls itself in `owned_by`
    context_size  tokens; None where it does not say
    """

    state = "remote"

    def __init__(self, name: str, model: RemoteModel, policy: Policy, server_metrics: ServerMetrics) -> None:
        super().__init__(name, model.max_concurrency, policy, server_metrics)
        self.is_reachable: bool | None = None
        self.failure: str | None = None
        self.owner = ""
        self.context_size: int | None = None
        self._model = model
        self._client = RemoteClient(name, model)
        self._has_looked = asyncio.Event()
        self._has_answered = False

    async def watch(self) -> None:
        """Look from time to time whether the server is there, and what it says of the model. Never returns."""
        while True:
            try:
                await self._look()
            finally:
                self._has_looked.set()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def close(self) -> None:
        await self._client.close()

    async def answers(self, body: Any, raw: bytes, *, remembers: bool) -> list[Answer]:
        """The answers to a request, one for each prompt. `body`: what `raw` was read as. `remembers`: whether another
        edgespec may keep the texts. Raises InvalidRequest.
        """
        await self._has_looked.wait()  # which tells the owner
        remembers = remembers and self._model.remembers
        if isinstance(body, CompletionRequest):
            calls = pass_completions(body, raw, self.owner, remembers=remembers)
        else:
            calls = [self._make_call(body, raw, remembers=remembers)]
        return [partial(self._answer, call) for call in calls]

    def _make_call(self, body: Any, raw: bytes, *, remembers: bool) -> RemoteCall:
        if isinstance(body, ChatRequest):
            return pass_chat(raw, self.owner, remembers=remembers)
        return translate(body.generation_spec(), self.owner, remembers=remembers)

    async def count(self, body: Any, raw: bytes) -> int:
        """The tokens of a prompt, where the server counts them as llama-server and edgespec do. See `answers`."""
        request_context().model = self.name
        call = self._make_call(body, raw, remembers=False)
        fields = {**call.body, "model": self._model.model}
        try:
            return int((await self._read(f"{call.path}/input_tokens", fields, _COUNT_S))["input_tokens"])
        except _MALFORMED as error:
            raise RemoteFailure(self.name, "does not count tokens", "Send the request itself.") from error
        except HttpError as error:
            if error.status not in (404, 405, 501):
                raise
            hint = "Send the request itself."
            raise InvalidRequest(f"the server behind '{self.name}' does not count tokens.", hint=hint) from error

    async def _answer(self, call: RemoteCall, turn: Turn, copy: int) -> AsyncGenerator[list[Part], None]:
        """The parts of one answer, in batches as they arrive. The turn ends with it; closing it closes the request."""
        record, began_s, answer = request_context(), monotonic(), RemoteAnswer(call.warnings)
        record.begin()
        try:
            async with aclosing(self._client.chunks(call.path, call.make_body(self._model.model, copy))) as events:
                while (batch := await self._next(events, turn, answer)) is not None:
                    if parts := merge_deltas(self._convert(answer, batch)):
                        yield parts
            if answer.reason is None:
                raise Unreachable(self.name, "ended the answer early", "Try again.")
            yield merge_deltas(list(answer.finish()))
            self._has_answered = True
            self._note(None)
        except EdgespecError as error:
            self._note(error)
            raise
        finally:
            self.leave()
            if answer.has_text or answer.reason is not None:
                finished = answer.summarize()
                record.add(finished)
                self._server_metrics.add(self.name, finished, monotonic() - began_s)
            record.end()

    async def _next(
        self, events: AsyncGenerator[list[dict[str, Any]], None], turn: Turn, answer: RemoteAnswer
    ) -> list[dict[str, Any]] | None:
        """The next events; None at the end, and when the time of the call is over. Raises HttpError where nothing of
        the answer has arrived then.
        """
        try:
            async with asyncio.timeout(turn.ends_s - monotonic()):
                return await anext(events, None)
        except TimeoutError:
            if not answer.has_text:
                raise self._time_out() from None
        answer.reason = "length"
        return None

    def _convert(self, answer: RemoteAnswer, batch: list[dict[str, Any]]) -> list[Part]:
        """The parts in events. Raises Unreachable for what no such server sends."""
        try:
            return [part for event in batch for part in answer.parts(event)]
        except _MALFORMED as error:
            raise RemoteFailure(self.name, "answers in another form than OpenAI's", CHECK_URL) from error

    async def embed(
        self, texts: Sequence[str | list[int]], ends_s: float, dimensions: int | None = None
    ) -> list[Embedding]:
        """A vector for each text, within a turn; see ModelSlot.embed. The first has the tokens of all."""
        body: dict[str, Any] = {"model": self._model.model, "input": list(texts), "encoding_format": "float"}
        if dimensions is not None:
            body["dimensions"] = dimensions
        try:
            found = await self._read("/embeddings", body, ends_s - monotonic())
            tokens = int((found.get("usage") or {}).get("prompt_tokens") or 0)
            ordered = sorted(found["data"], key=lambda each: int(each["index"]))
            vectors = [tuple(float(number) for number in each["embedding"]) for each in ordered]
            if len(vectors) != len(texts):
                raise ValueError("there is no vector for each text")
        except _MALFORMED as error:
            raise RemoteFailure(self.name, "has no embeddings in OpenAI's form", CHECK_URL) from error
        self._count_embeddings(len(vectors), tokens)
        return [Embedding(vector, 0 if number else tokens) for number, vector in enumerate(vectors)]

    async def _read(self, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The JSON object that answers `body` within `seconds`. Raises HttpError."""
        try:
            async with asyncio.timeout(seconds):
                found = await self._client.read("POST", path, body)
        except TimeoutError as error:
            raise self._time_out() from error
        except EdgespecError as error:
            self._note(error)
            raise
        self._note(None)
        return found

    def _time_out(self) -> HttpError:
        message = f"the server behind '{self.name}' did not answer in time."
        return HttpError(504, message, hint="Try again, or ask for less.")

    async def _look(self) -> None:
        """Read the list of models."""
        try:
            async with asyncio.timeout(_LOOK_S):
                listed = (await self._client.read("GET", "/models")).get("data")
        except TimeoutError:
            self._note(Unreachable(self.name, "cannot be reached (no answer)", "Start it."))
        except EdgespecError as error:
            if isinstance(error, Unreachable) or not self._has_answered:  # it may have no list
                self._note(error)
        else:
            self._note(None)
            models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
            found = [each for each in models if each.get("id") == self._model.model]
            if found or len(models) == 1:  # which answers to any name
                self._describe((found or models)[0])

    def _describe(self, listed: Mapping[str, Any]) -> None:
        """Keep what the list says of the model."""
        meta = listed.get("meta")  # llama-server's
        sizes = [*(listed.get(name) for name in _CONTEXTS), meta.get("n_ctx") if isinstance(meta, dict) else None]
        self.context_size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
        self.owner = str(listed.get("owned_by") or "")

    def _note(self, error: EdgespecError | None) -> None:
        """Keep what an attempt tells of the server. What it refuses of a request, or has no time for, tells nothing."""
        failure = None
        if isinstance(error, HttpError) and not isinstance(error, RemoteRefusal):
            failure = error.log_message
        is_reachable = not isinstance(error, Unreachable)
        if failure is not None and failure != self.failure:
            _LOG.warning("%s: %s", self.name, failure)
        elif is_reachable and self.is_reachable is False:
            _LOG.info("%s: the server behind it can be reached again", self.name)
        self.is_reachable, self.failure = is_reachable, failure
        self._server_metrics.note_remote(self.name, is_reachable=is_reachable)
