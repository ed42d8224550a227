"""RemoteSlot: a model of another server, its queue of requests, and whether that server can be reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Any

from edgespec.engine.prompts import Embedding
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.server.fields import compute
from edgespec.server.http import HttpError, Policy, TimedOut
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
from edgespec.server.remote_requests import RemoteAnswer, RemoteCall, pass_chat, pass_completions, translate
from edgespec.server.slots import Answer, Slot, Turn
from edgespec.service.generation_spec import GenerationSpec
from edgespec.service.response import Part, merge_deltas

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
        owner, remembers = self.owner, remembers and self._model.remembers

        def read() -> Sequence[RemoteCall]:
            if isinstance(body, ChatRequest):
                return [pass_chat(raw, owner, remembers=remembers)]
            if isinstance(body, CompletionRequest):
                return pass_completions(body, raw, owner, remembers=remembers)
            specs: Sequence[GenerationSpec] = body.generation_specs()
            return [translate(spec, owner, remembers=remembers) for spec in specs]

        return [partial(self._answer, call) for call in await compute(len(raw), read)]

    async def count(self, body: Any, raw: bytes) -> int:
        """The tokens of a prompt, where the server counts them as llama-server and edgespec do. See `answers`."""
        request_context().model = self.name
        owner = self.owner

        def read() -> RemoteCall:
            if isinstance(body, ChatRequest):
                return pass_chat(raw, owner, remembers=False)
            return translate(body.generation_spec(), owner, remembers=False)

        call = await compute(len(raw), read)
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
            if not answer.is_whole:
                raise Unreachable(self.name, "ended the answer early", "Try again.")
            yield merge_deltas(list(answer.finish()))
            self._has_answered = True
            self._note(None)
        except EdgespecError as error:
            self._note(error)
            raise
        finally:
            self.leave()
            if answer.has_text or answer.is_whole:
                finished = answer.summarize()
                record.add(finished)
                self._server_metrics.add(self.name, finished, monotonic() - began_s)
            record.end()

    async def _next(
        self, events: AsyncGenerator[list[dict[str, Any]], None], turn: Turn, answer: RemoteAnswer
    ) -> list[dict[str, Any]] | None:
        """The next events; None at the end, and when the time of the call is over. Raises TimedOut where nothing of the
        answer has arrived then.
        """
        try:
            async with asyncio.timeout(turn.ends_s - monotonic()):
                return await anext(events, None)
        except TimeoutError:
            if not answer.has_text:
                raise self._time_out() from None
        answer.cut()
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
        """The JSON object that answers `body` within `seconds`. Raises TimedOut."""
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

    def _time_out(self) -> TimedOut:
        message = f"the server behind '{self.name}' did not answer in time."
        return TimedOut(message, hint="Try again, or ask for less.")

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
