"""What a front end asks of an engine: open models, generate, measure. `LocalEngine` and `EngineProcess` are the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.client.stream import Stream
from edgespec.engine.events import AnswerStart, Event, Prompt, Request, SlotState
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.prompts import Embedding
from edgespec.errors import BackendError, EdgespecError, InvalidRequest, NotReady
from edgespec.machines.memory import DeviceMemory
from edgespec.models.load_config import LoadConfig
from edgespec.progress import Reporter


class EngineClient(ABC):
    """Every method returns at once. Jobs run in order, up to `max_concurrency` answers at the same time; beside them go
    `speculate`, `draft_stats`, `devices`, `slots` and `count`.

    A stream of work that needs an open model raises InvalidRequest if there is none.
    """

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo | None:
        """The open model; None if there is none."""

    @property
    @abstractmethod
    def resident(self) -> int:
        """Bytes of memory that the engine and this process take."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all work, store what was learned and free the model."""

    @abstractmethod
    def call(self, method: str, *arguments: Any, reporter: Reporter | None = None) -> Stream[Any]:
        """Begin the work of the method of that name below."""

    def take_failure(self) -> EdgespecError | None:
        """Why the engine has ended by itself while no stream was there to tell it; once for each end."""
        return None

    def open(
        self,
        config: LoadConfig,
        reporter: Reporter,
        settings_s: float | None = None,
        *,
        measures_later: bool = False,
    ) -> Stream[ModelInfo]:
        """Open a model instead of the present one, which stays open if that fails.

        `settings_s`: see Loader. `measures_later`: a request waits, so that measurements are left for idle time.
        """
        return self.call("open", config, settings_s, measures_later, reporter=reporter)

    def change_draft(self, config: LoadConfig, reporter: Reporter) -> Stream[ModelInfo]:
        """Open another draft for the model. On failure the present draft stays."""
        return self.call("change_draft", config, reporter=reporter)

    def stream(self, request: Request, speculation: Speculation | None = None) -> Stream[Event]:
        """Generate. `speculation` replaces the engine's for this generation.

        Another version of an adapted draft is loaded first, once the running generations end.
        """
        return self.call("stream", request, speculation)

    def speculate(self, argument: str) -> Stream[ModelInfo]:
        """Run `/spec argument`, during a generation too. Raises InvalidRequest."""
        return self.call("speculate", argument)

    def draft_stats(self) -> Stream[DraftStats | None]:
        """Read what the autopilot has learned; None before it has measured."""
        return self.call("draft_stats")

    def count(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> Stream[int]:
        """Count the tokens of a prompt, which may be more than the context holds."""
        return self.call("count", prompt, dict(variables), start)

    def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: bool = False) -> Stream[Embedding]:
        """Embed texts, or their tokens; see engine.prompts.embed."""
        return self.call("embed", list(texts), truncate)

    def devices(self) -> Stream[Sequence[DeviceMemory]]:
        """List the accelerators that a model would run on."""
        return self.call("devices")

    def slots(self) -> Stream[Sequence[SlotState]]:
        """List what the slots of the model hold."""
        return self.call("slots")


def require_model(client: EngineClient) -> ModelInfo:
    """Return the open model. Raises InvalidRequest if there is none."""
    if (model_info := client.model_info) is None:
        raise no_model()
    return model_info


def no_model() -> InvalidRequest:
    """The error of work that needs an open model when there is none."""
    return NotReady("no model is open.", hint="/model chooses one.")


def closed() -> BackendError:
    """The error of work for an engine that has been closed."""
    return BackendError("the model has been closed.")
