"""Ollama's interface: /api/chat, /api/generate, and the models as it describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.answers.generation_spec import GenerationSpec, make_message, split_start
from edgespec.answers.response import Done
from edgespec.engine.events import Gap, Prompt
from edgespec.engine.structure import json_structure
from edgespec.errors import InvalidRequest
from edgespec.server.answers import Block, Event, Step, Writer, read_arguments
from edgespec.server.fields import (
    FEW,
    MANY,
    NO_LIMIT,
    Body,
    FunctionTool,
    GenerationBody,
    Said,
    SamplingBody,
    Stop,
    Stops,
    Temperature,
    ThinkingBody,
    warn_of_fields,
)
from edgespec.server.http import BodyRoute, EventStream, GetRoute, HttpError, JsonResponse, dump_json, require_manager
from edgespec.server.inputs import EmbeddingRequest, embedding_route
from edgespec.server.media import warn_of_media
from edgespec.server.models import AnySlot, Models, generate, require_local
from edgespec.server.openai import ChatMessage
from edgespec.server.record import request_context
from edgespec.server.slots import ModelSlot

FormatAnswer = Callable[[str, str, list[Block]], dict[str, Any]]
"""Formats text, reasoning and tool calls as the fields of a line."""


class LineWriter(Writer):
    """One answer, with times in nanoseconds. Calls are whole; one that was cut is left out: no field would say so."""

    def __init__(self, model: str, form: FormatAnswer) -> None:
        super().__init__()
        self._model = model
        self._form = form
        self._began_s = monotonic()

    def write(self, index: int, step: Step) -> Iterator[Event]:
        match step:
            case "grow", Block(kind="text"), text:
                yield self._line(text, **self._format_scores())
            case "grow", Block(kind="reasoning"), text:
                yield self._line(reasoning=text, **self._format_scores())
            case "close", Block(kind="call", status="completed") as block, _:
                yield self._line(calls=[block], **self._format_scores())
            case Done():
                yield self._line(**self._format_scores(), **self._format_end(step))

    def response_body(self) -> dict[str, Any]:
        answer = self.answers[0]
        assert answer.end is not None
        calls = [block for block in answer.calls if block.status == "completed"]
        more = {**({"logprobs": answer.scores} if answer.scores else {}), **self._format_end(answer.end)}
        return self._line(answer.join("text"), answer.join("reasoning"), calls, **more)

    def load_body(self, reason: Literal["load", "unload"]) -> dict[str, Any]:
        """The answer to a request without a prompt, which has loaded or unloaded the model."""
        return self._line(done=True, done_reason=reason)

    def _line(
        self, text: str = "", reasoning: str = "", calls: Sequence[Block] = (), *, done: bool = False, **more: Any
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": format_time(datetime.now(UTC))}
        return {**head, **self._form(text, reasoning, [*calls]), "done": done, **more}

    def _format_scores(self) -> dict[str, Any]:
        scores = self.take_scores(0)
        return {"logprobs": scores} if scores else {}

    def _format_end(self, end: Done) -> dict[str, Any]:
        """The last line's fields. What is neither reading nor writing counts as loading, such as waiting."""
        total_s, metrics = monotonic() - self._began_s, end.metrics
        written_s = (metrics.ttft_s or metrics.prefill_s) - metrics.prefill_s
        written_s += (metrics.tpot_s or 0.0) * max(0, metrics.emitted_tokens - 1)
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": round(total_s * 1e9),
            "load_duration": round(max(0.0, total_s - metrics.prefill_s - written_s) * 1e9),
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": round(metrics.prefill_s * 1e9),
            "eval_count": metrics.emitted_tokens,
            "eval_duration": round(written_s * 1e9),
            **end.extensions(),
        }


class LineStream(EventStream):
    """JSON objects, one a line. Nothing is sent in silences: every line must be an object."""

    content_type = b"application/x-ndjson"
    format = staticmethod(lambda data: dump_json(data) + b"\n")
    comment = staticmethod(lambda text: b"")


def format_message(text: str, reasoning: str, calls: list[Block]) -> dict[str, Any]:
    made = [
        {
            "id": each.call_id(),
            "function": {"index": each.number, "name": each.name, "arguments": read_arguments(each.text)},
        }
        for each in calls
    ]
    more = {name: value for name, value in (("thinking", reasoning), ("tool_calls", made)) if value}
    return {"message": {"role": "assistant", "content": text, **more}}


def format_response(text: str, reasoning: str, _calls: list[Block]) -> dict[str, Any]:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


def format_raw(text: str, reasoning: str, _calls: list[Block]) -> dict[str, Any]:
    """The answer to a raw prompt, in which reasoning and text are not separated."""
    return {"response": reasoning + text}


def format_time(moment: datetime) -> str:
    """RFC 3339, in UTC."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


_NOT_FOLLOWED = frozenset({
    "main_gpu", "mirostat", "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread",
    "penalize_newline", "repeat_last_n", "tfs_z", "use_mlock", "use_mmap",
})  # fmt: skip
_NO_REASON = "it is not supported in requests."
_REASONS = {"num_ctx": "the server's --ctx sets the context."}


class OllamaOptions(SamplingBody):
    """The `options` of a request. Those of Ollama that are not followed are named in `warnings`; others are ignored."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    temperature: Temperature | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31)] | None = None
    stop: Stop | Stops | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of a GenerationSpec. As in Ollama, a seed of -1 is random, and num_predict below 0 no limit."""
        given = self.model_extra or {}
        ignored = sorted(_NOT_FOLLOWED & given.keys())
        others = warn_of_fields({name: value for name, value in given.items() if name not in _NOT_FOLLOWED})
        return {
            "settings": self.settings(),
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": NO_LIMIT if (self.num_predict or 0) < 0 else self.num_predict or None,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "warnings": (
                *(f"options.{name} is ignored: {_REASONS.get(name, _NO_REASON)}" for name in ignored),
                *(f"options.{warning}" for warning in others),
            ),
        }


class OllamaBody(ThinkingBody, GenerationBody):
    """The fields that /api/chat and /api/generate share."""

    stream: bool | None = True
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None

    def make_spec(self, prompt: Prompt, **more: Any) -> GenerationSpec:
        options = self.options or OllamaOptions()
        effort = self.think if isinstance(self.think, str) else None
        thinking = self.make_thinking(is_on=None if self.think is None else bool(self.think), effort=effort)
        structure = json_structure(None if self.format == "json" else self.format) if self.format else None
        return GenerationSpec(
            prompt,
            structure=structure,
            draft_max=self.draft_max,
            thinking=thinking,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **options.fields(),
            **more,
        )


class OllamaChatRequest(OllamaBody):
    """The body of /api/chat. A last message of the assistant is the beginning of the answer."""

    messages: Annotated[list[ChatMessage], MANY] = Field(default_factory=list)
    tools: Annotated[list[FunctionTool], FEW] | None = None

    def writer(self) -> LineWriter:
        return LineWriter(self.model, format_message)

    def said(self) -> Iterator[Said]:
        return (each.said() for each in self.messages)

    def generation_spec(self) -> GenerationSpec:
        messages, start, last = tuple(each.message() for each in self.messages), None, self.messages[-1]
        if last.role == "assistant" and last.content and not last.tool_calls:
            messages, start = split_start(messages)
        tools = tuple(each.function.tool() for each in self.tools or ())
        spec = self.make_spec(messages, start=start, tools=tools)
        return replace(spec, warnings=(*spec.warnings, *warn_of_media(self.said())))


class OllamaGenerateRequest(OllamaBody):
    """The body of /api/generate. With `raw` the prompt is text to continue, without a chat template."""

    refused = ("images", "template", "context")

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    def writer(self) -> LineWriter:
        return LineWriter(self.model, format_raw if self.raw or self.suffix else format_response)

    def generation_spec(self) -> GenerationSpec:
        if (self.raw or self.suffix) and self.system:
            raise InvalidRequest("raw and suffix have no system message.", hint="Put it into the prompt.")
        text = self.prompt or ""
        if self.raw or self.suffix:
            return self.make_spec(Gap(text, self.suffix) if self.suffix else text)
        system = (make_message("system", self.system),) if self.system else ()
        return self.make_spec((*system, make_message("user", text)))


API_VERSION = "0.12.0"
"""The version of Ollama whose interface this is: clients compare it."""

_LONG_S = 3e9  # about a century, for models that are not unloaded by themselves; clients need a date


class ShowRequest(Body):
    """The body of /api/show. `name` is an older name of `model`."""

    model: str = Field(default="", validation_alias=AliasChoices("model", "name"), max_length=512)


def list_running(models: Models) -> dict[str, Any]:
    running = []
    for slot in models.slots.values():
        if (model_info := slot.model_info) is None:
            continue
        fit = model_info.fit
        size = fit.needed if fit is not None else slot.resident
        expires = datetime.now(UTC) + timedelta(seconds=min(slot.unloads_in_s, _LONG_S))
        running.append({
            **_describe(slot),
            "size": size,
            "size_vram": min(size, fit.memory.own_device_bytes) if fit is not None else 0,
            "expires_at": format_time(expires),
            "context_length": model_info.context_size,
        })  # fmt: skip
    return {"models": running}


def show(models: Models, slot: AnySlot) -> dict[str, Any]:
    """The body of /api/show. The chat template, and whether the model reasons, are known only while it is loaded."""
    model_info = slot.model_info if isinstance(slot, ModelSlot) else None
    template = (model_info.chat_template if model_info is not None else None) or ""
    reasons = model_info is not None and model_info.template.reasoning is not None
    capabilities = ["completion", "tools", *(["thinking"] if reasons else [])]
    # Clients read the context under the name of the architecture.
    described: dict[str, Any] = {"general.architecture": "edgespec", "general.basename": slot.name}
    if (facts := slot.facts) is not None:
        described |= {"general.parameter_count": facts.parameters, "edgespec.family": facts.family}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _describe(slot)["details"],
        "model_info": {**described, "edgespec.context_length": slot.context_size},
        "capabilities": capabilities,
        "modified_at": _format_created(models),
    }


def _describe(slot: AnySlot) -> dict[str, Any]:
    """The fields of a model that every list has. The digest is the SHA-256 of the model's name, not of its file."""
    name = slot.name if ":" in slot.name else f"{slot.name}:latest"
    facts = slot.facts
    details = {
        "parent_model": "",
        "format": facts.format if facts is not None else "",
        "family": facts.family if facts is not None else "",
        "families": [facts.family] if facts is not None else None,
        "parameter_size": facts.parameter_size if facts is not None else "",
        "quantization_level": facts.quantization if facts is not None else "",
    }
    return {"name": name, "model": name, "digest": sha256(name.encode()).hexdigest(), "details": details}


def _size(slot: AnySlot) -> int:
    """Bytes of the weights; 0 if they are not known."""
    return slot.facts.n_bytes if slot.facts is not None else 0


def _format_created(models: Models) -> str:
    return format_time(datetime.fromtimestamp(models.created_s, UTC))


def format_embeddings(body: EmbeddingRequest, vectors: list[tuple[float, ...]], tokens: int) -> dict[str, Any]:
    """The body of /api/embed. Times are in nanoseconds."""
    times = {"total_duration": round((monotonic() - request_context().began_s) * 1e9), "load_duration": 0}
    return {"model": body.model, "embeddings": vectors, **times, "prompt_eval_count": tokens}


_COMMANDS = (  # what Ollama's interface does to models, and what does it here
    ("/api/pull", "POST", "Run `edgespec pull REF`, then restart `edgespec serve` with it"),
    ("/api/create", "POST", "Name a model in the file of `edgespec serve --config`"),
    ("/api/copy", "POST", "Give a model another name: `edgespec serve NAME=REF`"),
    ("/api/push", "POST", "Upload files with the hub's own program"),
    ("/api/delete", "DELETE", "Run `edgespec rm REF`"),
)


async def _refuse(command: str, request: Request) -> Response:
    raise HttpError(501, f"{request.url.path} is not served: models are managed by commands.", hint=f"{command}.")


def ollama_routes(models: Models) -> list[Route]:
    async def answer(request: Request, body: OllamaChatRequest | OllamaGenerateRequest) -> Response:
        if body.messages if isinstance(body, OllamaChatRequest) else body.prompt:
            return await generate(request, models, body, LineStream)
        slot = models.choose(body.model)  # the request only loads or unloads it
        body.model = body.model or slot.name
        slot.apply_keep_alive(body.keep_alive)
        if body.keep_alive == 0:
            require_manager()
            await require_local(slot).unload()
        else:
            async with models.turn(slot):
                pass
        return JsonResponse(body.writer().load_body("unload" if body.keep_alive == 0 else "load"))

    async def show_model(_request: Request, body: ShowRequest) -> Response:
        return JsonResponse(show(models, models.choose(body.model)))

    def list_tags() -> dict[str, Any]:
        modified_at = _format_created(models)
        return {"models": [{**_describe(slot), "modified_at": modified_at, "size": _size(slot)} for slot in models.all]}

    return [
        BodyRoute("/api/chat", OllamaChatRequest, answer),
        BodyRoute("/api/generate", OllamaGenerateRequest, answer),
        embedding_route("/api/embed", models, format_embeddings, truncates=True),
        embedding_route(
            "/api/embeddings",
            models,
            lambda _body, vectors, _tokens: {"embedding": next(iter(vectors), ())},
            truncates=True,
        ),
        BodyRoute("/api/show", ShowRequest, show_model),
        GetRoute("/api/tags", list_tags),
        GetRoute("/api/ps", lambda: list_running(models)),
        GetRoute("/api/version", lambda: {"version": API_VERSION}),
        *(Route(path, partial(_refuse, command), methods=[method]) for path, method, command in _COMMANDS),
    ]
