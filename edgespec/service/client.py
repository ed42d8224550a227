"""What a front end asks of an engine: open models, generate, measure. `LocalEngine` and `EngineProcess` are the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.backends import BackendName
from edgespec.backends.devices import DeviceMemory
from edgespec.backends.settings import RuntimeSettings
from edgespec.controller.stats import DraftStats
from edgespec.engine.drafting import Speculation
from edgespec.engine.embeddings import Embedding
from edgespec.engine.events import AnswerStart, Event, Prompt, Request
from edgespec.engine.prompts import RawText
from edgespec.errors import EdgespecError, InvalidRequest, NotReady
from edgespec.planner.memory import Fit
from edgespec.planner.plan import LoadConfig, Reporter
from edgespec.registry.schema import SamplingDefaults
from edgespec.service.stream import Stream


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, described by values that can be sent to another process.

    drafters            what the user calls each drafter, by its name in the registry
    chat_template       Jinja source, as it came with the model
    fit                 the memory estimate made before loading; None for the toy runtime
    plain_speed         tokens/s of plain decoding; None until it has been measured
    devices             accelerators with their free memory
    max_concurrency     answers that can be generated at the same time
    no_batching_reason  why answers do not share forwards; None where they do
    settings            of the runtime, as measured at the first load; None where it has none to choose
    exact_width         rows of every forward, where --exact fixes them; else None
    remembered          about how many tokens of the user's earlier texts the memory has; None where it is off
    """

    name: str
    backend: BackendName
    drafters: Mapping[str, str]
    sampling: SamplingDefaults
    chat_template: str | None
    fit: Fit | None
    plain_speed: float | None
    context_size: int
    speculation: Speculation
    is_paused: bool
    devices: tuple[DeviceMemory, ...]
    max_concurrency: int
    no_batching_reason: str | None
    settings: RuntimeSettings | None = None
    exact_width: int | None = None
    remembered: int | None = None

    @property
    def draft(self) -> str:
        """What the user calls the drafters, joined by '+'; 'none' for plain decoding."""
        return "+".join(self.drafters.values()) or "none"


class EngineClient(Protocol):
    """Every method returns at once. Jobs run in order, up to `max_concurrency` answers at the same time. The streams of
    `speculate`, `draft_stats`, `devices`, `count`, `render`, `tokenize` and `spell` do not wait for them.

    `model_info` is None where no model is open; a stream of work that needs one raises InvalidRequest.
    """

    @property
    def model_info(self) -> ModelInfo | None: ...

    @property
    def resident(self) -> int:
        """Bytes of memory that the engine and this process take."""

    def take_failure(self) -> EdgespecError | None:
        """Why the engine has ended by itself while no stream was there to tell it; once for each end."""

    def open(self, config: LoadConfig, reporter: Reporter) -> Stream[ModelInfo]:
        """Open a model in place of the present one, which stays open where that fails."""

    def change_draft(self, config: LoadConfig, reporter: Reporter) -> Stream[ModelInfo]:
        """Open another draft for the model. On failure the present draft stays."""

    def stream(self, request: Request, speculation: Speculation | None = None) -> Stream[Event]:
        """Generate. `speculation` replaces the engine's for this generation."""

    def plan(self, config: LoadConfig, reporter: Reporter) -> Stream[str]:
        """Report what `edgespec plan` reports of a model: what is known at once, then speeds once they are measured."""

    def speculate(self, argument: str) -> Stream[ModelInfo]:
        """Run `/spec argument`, during a generation too. Raises InvalidRequest."""

    def draft_stats(self) -> Stream[DraftStats | None]:
        """Read what the autopilot has learned; None before it has measured."""

    def count(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> Stream[int]:
        """Count the tokens of a prompt, which may be more than the context holds."""

    def render(self, request: Request) -> Stream[str]:
        """Write the prompt of a request, and the beginning of its answer, as the model reads it."""

    def tokenize(self, raw: RawText) -> Stream[list[int]]:
        """Split text into tokens."""

    def spell(self, tokens: Sequence[int]) -> Stream[list[bytes]]:
        """List the bytes of each token, and the spelling of control tokens. Raises InvalidRequest for unknown ids."""

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Stream[Embedding]:
        """Compute a vector for each text."""

    def devices(self) -> Stream[tuple[DeviceMemory, ...]]:
        """List the accelerators that a model would run on."""

    def close(self) -> None:
        """Cancel all work, store what was learned and free the model."""


def require_model(client: EngineClient) -> ModelInfo:
    """Return the open model. Raises InvalidRequest where there is none."""
    if (model_info := client.model_info) is None:
        raise no_model()
    return model_info


def no_model() -> InvalidRequest:
    """The error of work that needs an open model where there is none."""
    return NotReady("no model is open.", hint="/model chooses one.")
