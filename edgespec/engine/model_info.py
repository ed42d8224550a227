"""Describes a loaded model by values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import BackendName
from edgespec.backends.settings import RuntimeSettings
from edgespec.machines.memory import DeviceMemory
from edgespec.models.file_facts import FileFacts
from edgespec.models.fit import Fit
from edgespec.models.load_config import LoadConfig
from edgespec.models.registry import SamplingDefaults
from edgespec.text.template_probe import NO_TEMPLATE, TemplateProfile


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, described by values that can be sent to another process.

    drafters            what the user calls each drafter, by its name in the registry
    chat_template       Jinja source, as it came with the model
    fit                 the memory estimate made before loading; None for the toy runtime
    plain_speed         tokens/s of plain decoding; None until it has been measured
    devices             accelerators with their free memory
    max_concurrency     answers that can be generated at the same time
    no_batching_reason  why answers do not share forwards; None if they do
    settings            of the runtime, as measured at the first load; None if it has none to choose
    exact_width         rows of every forward, if --exact fixes them; else None
    remembered          about how many tokens of the user's earlier texts the memory has; None if it is off
    template            what the chat template shows, and how the model writes
    facts               what the model's file tells; None for the toy runtime
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
    template: TemplateProfile = NO_TEMPLATE
    facts: FileFacts | None = None

    @property
    def draft(self) -> str:
        """What the user calls the drafters, joined by '+'; 'none' for plain decoding."""
        return "+".join(self.drafters.values()) or "none"

    def keep_speculation(self, config: LoadConfig) -> LoadConfig:
        """`config` with the present settings of `/spec`, for the next draft or model."""
        kept = replace(config, is_paused=self.is_paused)
        now = self.speculation
        return replace(kept, draft_max=now.draft_max, draft_tree=now.draft_tree) if now.drafters else kept
