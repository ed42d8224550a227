"""An engine that is asked for work: models opened, answers generated, speeds foretold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.backends import BackendName
from edgespec.backends.devices import DeviceMemory
from edgespec.controller.stats import DraftStats
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import Event, Request
from edgespec.errors import InvalidRequest
from edgespec.planner.memory import Fit
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.registry.schema import SamplingDefaults
from edgespec.service.worker import Job
from edgespec.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is open, in words and numbers that can be handed on.

    draft        'none', 'ngram', the draft model's name, or how the target drafts for itself
    template     the model's chat template, as it came with the model
    fit          what was foretold of memory; None for the toy runtime
    plain_speed  tokens a second of plain decoding, once that has been measured
    devices      accelerators with their free memory
    at_once      answers that may be under way at a time
    unshared     why answers do not share their forwards; None where they do
    """

    name: str
    backend: BackendName
    draft: str
    sampling: SamplingDefaults
    template: str | None
    fit: Fit | None
    plain_speed: float | None
    context_size: int
    speculation: Speculation
    is_paused: bool
    devices: tuple[DeviceMemory, ...]
    max_concurrency: int
    no_batching_reason: str | None


class EngineClient(Protocol):
    """Jobs are queued at once and run in order, up to `max_concurrency` answers together. The other methods
    return while a job runs.

    `model_info` is None where no model is open. Work that needs one raises InvalidRequest.
    """

    @property
    def model_info(self) -> ModelInfo | None: ...

    @property
    def resident(self) -> int:
        """Bytes of memory that this program takes."""

    def open(self, request: LoadConfig, reporter: Reporter) -> Job[ModelInfo]:
        """Open a model in place of the present one, which is closed first: two may not fit in memory."""

    def change_draft(self, request: LoadConfig, reporter: Reporter) -> Job[ModelInfo]:
        """On failure the present draft stays."""

    def stream(self, request: Request, speculation: Speculation | None = None) -> Job[Event]:
        """One generation, with another way to draft for it alone where one is given."""

    def outlook(self, request: LoadConfig, reporter: Reporter) -> Job[str]:
        """What `edgespec plan` says of a model: facts at once, speeds after a measurement."""

    def speculate(self, argument: str) -> ModelInfo:
        """What `/spec` asks for, amid an answer too. Raises InvalidRequest."""

    def draft_stats(self) -> DraftStats | None:
        """What the autopilot knows; nothing before it has measured."""

    def count(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> Job[int]:
        """Tokens that a prompt takes."""

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Job[Embedding]:
        """A vector for each text."""

    def devices(self) -> tuple[DeviceMemory, ...]:
        """Accelerators that a model would run on."""

    def close(self) -> None:
        """Stop what is under way, keep what was learned, free the model."""


def require_model(client: EngineClient) -> ModelInfo:
    """Raises InvalidRequest where no model is open."""
    if client.model_info is None:
        raise InvalidRequest("no model is open.", hint="/model chooses one.")
    return client.model_info
