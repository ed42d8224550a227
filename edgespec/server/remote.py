"""Models of other servers: what these are asked, how their answers are read, and whether they can be reached."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.response import Done, Ending, Part, ReasoningDelta, Started, TextDelta, merge_deltas, new_id
from edgespec.answers.tools import format_call
from edgespec.core.metrics import Meter, Metrics
from edgespec.core.protocols import FinishReason
from edgespec.engine.events import Finished, Gap, Scored
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.prompts import Embedding
from edgespec.engine.structure import Json, Structure
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.server.fields import NO_LIMIT, GenerationBody
from edgespec.server.http import HttpError, Policy
from edgespec.server.media import require_text
from edgespec.server.metrics import ServerMetrics
from edgespec.server.openai import ChatRequest, CompletionRequest
from edgespec.server.record import request_context
from edgespec.server.remote_client import RemoteClient, RemoteFailure, RemoteModel, Unreachable
from edgespec.server.slots import GenerateAnswer, Slot
from edgespec.text.chat_template import Message
from edgespec.text.tool_calls import CallDelta, CallStart

T = TypeVar("T")

CHAT, TEXT = "/chat/completions", "/completions"
EDGESPEC, LLAMA_SERVER, VLLM, SGLANG = "edgespec", "llamacpp", "vllm", "sglang"
"""What servers call themselves in `owned_by` of their models."""

_CONTINUE = (EDGESPEC, VLLM, SGLANG)  # a given start of an answer if fields ask for it; llama-server needs none
_OPENAI = ("openai", "openai-internal", "system")
_SUPPORTED_BY = {  # fields that other servers refuse -> those that have them
    "draft_max": (EDGESPEC,),
    "memory": (EDGESPEC,),
    "reasoning_budget_tokens": (EDGESPEC, LLAMA_SERVER, VLLM),
    "repetition_detection": (EDGESPEC, VLLM),
    "chat_template_kwargs": (EDGESPEC, LLAMA_SERVER, VLLM, SGLANG),
}
_EXTENSIONS = ("draft_max", "memory", "repetition_detection")
_RENAMED = {  # of fields that a server calls otherwise
    (LLAMA_SERVER, "repetition_penalty"): "repeat_penalty",
    (VLLM, "reasoning_budget_tokens"): "thinking_token_budget",
}
_NOT_PASSED_ON = ("keep_alive", "ttl", "n", "stream", "stream_options")  # what this server does itself
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


def make_calls(body: Any, raw: bytes, owner: str, *, remembers: bool) -> list[RemoteCall]:
    """The requests by which another server answers `body`, one for each prompt, for OpenAI's chat or completions
    interface. Raises InvalidRequest.

    A request that came by one of these two interfaces is passed on with its own fields; others are translated.

    body       the validated body, which was read from the bytes `raw`
    owner      the `owned_by` of the model
    remembers  whether another edgespec may keep the texts
    """
    if not isinstance(body, ChatRequest | CompletionRequest):
        if not isinstance(body, GenerationBody):
            return [translate(body.generation_spec(), owner, remembers=remembers)]
        require_text(body.said(), request_context().caller.owner)
        (spec,) = body.generation_specs()
        return [translate(spec, owner, remembers=remembers)]
    given = {name: value for name, value in json.loads(raw).items() if name not in _NOT_PASSED_ON}
    numbers = body.model_dump(include={"seed", *_LIMITS} & given.keys())  # a client may write them as text
    given |= {name: None if number == NO_LIMIT else number for name, number in numbers.items()}
    given |= {"memory": False} if owner == EDGESPEC and not remembers else {}
    fields, warnings = _fit(given, owner, _EXTENSIONS)
    if isinstance(body, ChatRequest):
        return [RemoteCall(CHAT, fields, warnings)]
    if body.echo and (body.logprobs is not None or not all(isinstance(each, str) for each in body.prompts())):
        fault = "echo with logprobs or token ids needs a model of this server."
        raise InvalidRequest(fault, hint="Remove echo, or name another model.")
    fields.pop("echo", None)  # this server writes it
    return [RemoteCall(TEXT, {**fields, "prompt": prompt}, warnings) for prompt in body.prompts()]


def translate(spec: GenerationSpec, owner: str, *, remembers: bool) -> RemoteCall:
    is_endless = spec.max_tokens == NO_LIMIT
    fields: dict[str, Any] = {
        **spec.settings,
        "max_completion_tokens" if owner in _OPENAI else "max_tokens": None if is_endless else spec.max_tokens,
        "seed": spec.seed,
        "stop": list(spec.stop) or None,
        "draft_max": spec.draft_max,
        "memory": remembers if owner == EDGESPEC else None,
        "response_format": _format_structure(spec.structure) if spec.structure is not None else None,
    }
    if isinstance(spec.prompt, tuple):
        thinking = spec.thinking
        fields |= {
            **_format_tools(spec),
            "messages": [*_format_messages(spec.prompt)],
            "reasoning_effort": thinking.effort,
            "reasoning_budget_tokens": thinking.budget,
            "chat_template_kwargs": None if thinking.is_on is None else {"enable_thinking": thinking.is_on},
        }
        if spec.start is not None:
            fields["messages"].append({"role": "assistant", "content": spec.start.text})
            fields |= {"continue_final_message": True, "add_generation_prompt": False} if owner in _CONTINUE else {}
    elif isinstance(spec.prompt, Gap):
        fields |= {"prompt": spec.prompt.before, "suffix": spec.prompt.after}
    else:
        fields |= {"prompt": spec.prompt}
    kept, warnings = _fit(fields, owner, _SUPPORTED_BY)
    return RemoteCall(CHAT if "messages" in kept else TEXT, kept, (*spec.warnings, *warnings))


def _fit(fields: Mapping[str, Any], owner: str, names: Iterable[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields that have a value, without those among `names` that the other server does not know, and what has been
    left out, in sentences.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    lost = [name for name in names if name in given and owner not in _SUPPORTED_BY[name]]
    kept = {_RENAMED.get((owner, name), name): value for name, value in given.items() if name not in lost}
    return kept, tuple(f"{name} is ignored: the other server does not know it." for name in lost)


def _format_messages(messages: tuple[Message, ...]) -> Iterator[dict[str, Any]]:
    """The messages in OpenAI's form: with arguments as text, and with an id for each call and result, since requests by
    Ollama's interface may have none.
    """
    open_ids: list[str] = []  # of calls without a result
    for message in messages:
        out = message.as_dict()
        if calls := out.get("tool_calls"):
            out["tool_calls"] = []
            for call in calls:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                out["tool_calls"].append(format_call(call["id"] or new_id("call_"), name, text))
            open_ids = [call["id"] for call in out["tool_calls"]]
        elif message.role == "tool" and not out.get("tool_call_id"):
            out["tool_call_id"] = open_ids.pop(0) if open_ids else new_id("call_")
        yield out


def _format_tools(spec: GenerationSpec) -> dict[str, Any]:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`; none for a request without tools."""
    if not spec.tools:
        return {}
    tools = [each.to_dict() for each in spec.tools]
    for tool, described in zip(spec.tools, tools, strict=True):
        described["function"] |= {"strict": True} if tool.is_strict else {}
    forced = {"type": "function", "function": {"name": spec.forced_tool}}
    parallel = {} if spec.parallel_calls is None else {"parallel_tool_calls": spec.parallel_calls}
    return {"tools": tools, "tool_choice": forced if spec.forced_tool else spec.tool_choice, **parallel}


def _format_structure(structure: Structure) -> dict[str, Any]:
    """The `response_format` of a JSON structure. Regular expressions and grammars come by OpenAI's chat and completions
    only, whose requests are not translated.
    """
    ((part,),) = structure.alternatives
    assert isinstance(part, Json)
    schema = json.loads(part.schema)
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)
    if schema == {"type": "object"}:  # which more servers have
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


_ENDINGS: dict[str | None, Ending] = {
    "length": "length",
    "repetition": "repetition",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}
_LARGE = 10**12
_REPORTED = {"usage": dict, "timings": dict, "warnings": list}


class RemoteAnswer:
    """One answer as it arrives. `parts` takes each event of the stream, `finish` follows the last.

    reason     why the answer ended; None if that is not known
    has_begun  whether anything of the answer has arrived
    """

    def __init__(self, warnings: tuple[str, ...]) -> None:
        """`warnings`: what of the request is not followed, in sentences."""
        self.reason: str | None = None
        self.has_begun = False
        self._warnings = warnings
        self._began_s = self._first_s = self._last_s = monotonic()  # the last two: of the first event and of the last
        self._n_events = 0  # with text
        self._n_calls = 0
        self._call_key: str | None = None  # of the call that is open
        self._stop: str | None = None
        self._reported: dict[str, Any] = {}

    def parts(self, event: Mapping[str, Any]) -> Iterator[Part]:
        """The parts in an event of /v1/chat/completions or /v1/completions, or in a whole answer."""
        found = {name: event[name] for name, kind in _REPORTED.items() if isinstance(event.get(name), kind)}
        self._reported |= {name: value for name, value in found.items() if value}
        self._last_s = monotonic()
        if not self.has_begun:
            self.has_begun, self._first_s = True, self._last_s
            yield Started(0, 0)  # the counts come with the end
        for choice in event.get("choices") or ():
            parts = list(self._read_choice(choice))
            self._n_events += bool(parts)
            yield from parts

    def finish(self) -> Iterator[Part]:
        # Some servers call it a stop if an answer ends with a call.
        reason = _ENDINGS.get(self.reason, "tool_calls" if self._n_calls else "stop")
        noted = (*self._warnings, *(str(each) for each in self._reported.get("warnings", ())))
        if "usage" not in self._reported:
            noted = (*noted, "the other server reports no usage: the tokens are the events of its stream.")
        yield Done(reason, self._stop, self._measure(), noted, self._reported.get("timings"))

    def summarize(self) -> Finished:
        """What is counted of the answer, also of one that was left or that failed."""
        reason: FinishReason = "cancelled" if self.reason is None else "length" if self.reason == "length" else "stop"
        return Finished(reason, (), 0, self._measure(), self._stop)

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Part]:
        delta = choice.get("delta") or choice.get("message") or {}
        yield from _read_scores(choice.get("logprobs") or {})
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            self._call_key = None
            yield ReasoningDelta(str(text))
        if text := delta.get("content") or delta.get("refusal") or choice.get("text"):
            self._call_key = None
            yield TextDelta(str(text))
        for number, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._read_call(str(call.get("index", number)), call.get("function") or {})
        if reason := choice.get("finish_reason"):
            self.reason = str(reason)
            stop = choice.get("stop_reason")  # vLLM's: the stop string
            self._stop = stop if isinstance(stop, str) else None

    def _read_call(self, key: str, function: Mapping[str, Any]) -> Iterator[Part]:
        """A part of the call with this key. The next call, or the end of the answer, ends it."""
        if key != self._call_key:
            self._call_key = key
            self._n_calls += 1
            yield CallStart(self._n_calls - 1, str(function.get("name") or ""))
        if arguments := function.get("arguments"):
            yield CallDelta(self._n_calls - 1, str(arguments))

    def _measure(self) -> Metrics:
        """Counts as they were reported; times as the answer arrived here."""
        usage = self._reported.get("usage", {})
        emitted = _count(usage, "completion_tokens", self._n_events)
        arrived_s, ttft_s = self._last_s - self._first_s, self._first_s - self._began_s
        tpot_s = arrived_s / (emitted - 1) if emitted > 1 and arrived_s else None
        return replace(
            Meter().metrics(),
            prompt_tokens=_count(usage, "prompt_tokens"),
            emitted_tokens=emitted,
            tokens_per_second=1 / tpot_s if tpot_s else None,
            ttft_s=ttft_s if self.has_begun else None,
            tpot_s=tpot_s,
            prefill_s=ttft_s,
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
            reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
        )


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
    failure       why the server has failed the last time; None if it has not
    owner         what it calls itself in `owned_by`
    context_size  tokens; None if it does not say
    """

    state = "remote"
    facts = None  # its file is elsewhere

    def __init__(self, name: str, model: RemoteModel, policy: Policy, server_metrics: ServerMetrics) -> None:
        super().__init__(name, model.parallel, policy, server_metrics)
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

    async def answers(self, body: Any, raw: bytes, *, remembers: bool) -> list[GenerateAnswer]:
        """The answers to a request; see `make_calls`. Raises InvalidRequest."""
        await self._has_looked.wait()  # which tells the owner
        calls = make_calls(body, raw, self.owner, remembers=remembers and self._policy.remembers)
        return [partial(self._answer, call) for call in calls]

    async def count(self, body: Any, raw: bytes) -> int:
        """The tokens of a prompt, if the server counts them as llama-server and edgespec do. See `make_calls`."""
        request_context().model = self.name
        (call,) = make_calls(body, raw, self.owner, remembers=False)
        path = f"{call.path}/input_tokens"
        return await self._ask(path, call.body, _COUNT_S, lambda found: int(found["input_tokens"]))

    async def embed(
        self, texts: Sequence[str | list[int]], dimensions: int | None = None, *, truncate: bool = False
    ) -> list[Embedding]:
        """A vector for each text, within a turn; see ModelSlot.embed. The first Embedding holds the number of tokens of
        all texts. `truncate` is not sent: OpenAI's interface has no such field, and the other server refuses a text
        that is too long.
        """

        def read(found: dict[str, Any]) -> list[Embedding]:
            tokens = _count(found.get("usage"), "prompt_tokens")
            ordered = sorted(found["data"], key=lambda each: int(each["index"]))
            vectors = [tuple(map(float, each["embedding"])) for each, _ in zip(ordered, texts, strict=True)]
            return [Embedding(vector, 0 if number else tokens) for number, vector in enumerate(vectors)]

        size = {} if dimensions is None else {"dimensions": dimensions}
        asked = {"input": list(texts), "encoding_format": "float", **size}
        vectors = await self._ask("/embeddings", asked, self._policy.timeout_s, read)
        self._count_embeddings(len(vectors), vectors[0].tokens)
        return vectors

    async def _ask(self, path: str, body: Mapping[str, Any], seconds: float, read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` finds in the JSON object that answers `body` within `seconds`. Raises EdgespecError."""
        try:
            found = read(await self._client.read(path, seconds, {**body, "model": self._model.model}))
        except _MALFORMED as error:
            raise RemoteFailure(self.name, "answers in another form than OpenAI's") from error
        except EdgespecError as error:
            self._note(error)
            raise
        self._note(None)
        return found

    async def _answer(self, call: RemoteCall, _: ModelInfo | None, copy: int) -> AsyncGenerator[list[Part], None]:
        """The parts of one answer, in batches as they arrive, to be read by one task. Closing it closes the request."""
        began_s, answer = monotonic(), RemoteAnswer(call.warnings)
        body = call.make_body(self._model.model, copy)
        try:
            async with (
                asyncio.timeout(self._policy.timeout_s),
                aclosing(self._client.chunks(call.path, body)) as events,
            ):
                async for batch in events:
                    yield merge_deltas([part for event in batch for part in answer.parts(event)])
            if answer.reason is None:
                raise Unreachable(self.name, "ended the answer early", "Try again.")
        except TimeoutError:
            answer.reason = "length"
            if not answer.has_begun:
                raise self._client.late() from None
        except _MALFORMED as error:
            raise RemoteFailure(self.name, "answers in another form than OpenAI's") from error
        except EdgespecError as error:
            self._note(error)
            raise
        finally:
            if answer.has_begun:
                finished = answer.summarize()
                request_context().add(finished)
                self._server_metrics.add(self.name, finished, monotonic() - began_s)
        self._has_answered = True
        self._note(None)
        yield list(answer.finish())

    async def _look(self) -> None:
        try:
            listed = (await self._client.read("/models", _LOOK_S)).get("data")
        except EdgespecError as error:
            if isinstance(error, Unreachable) or not self._has_answered:  # it may have no list
                self._note(error)
            return
        self._note(None)
        models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        found = [each for each in models if each.get("id") == self._model.model]
        if found or len(models) == 1:  # which answers to any name
            told = (found or models)[0]
            meta = told.get("meta")  # llama-server's
            sizes = [*map(told.get, _CONTEXTS), meta.get("n_ctx") if isinstance(meta, dict) else None]
            self.context_size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
            self.owner = str(told.get("owned_by") or "")

    def _note(self, error: EdgespecError | None) -> None:
        """Keep what an attempt tells of the server; `error` is None if it has succeeded. A status below 500 is about
        the request, and says that the server works.
        """
        failure = error.log_message if isinstance(error, HttpError) and error.status >= 500 else None
        if failure is not None and failure != self.failure:
            _LOG.warning("%s: %s", self.name, failure)
        elif self.is_reachable is False and not isinstance(error, Unreachable):
            _LOG.info("%s: the server behind it can be reached again", self.name)
        self.is_reachable, self.failure = not isinstance(error, Unreachable), failure
        self._server_metrics.metric("remote_up", self.name).set(self.is_reachable)
