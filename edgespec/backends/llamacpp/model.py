"""A model on llama.cpp: its weights, its sessions, and drafts made of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, SelfDraftSpec
from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.selfdraft import open_self_draft
from edgespec.backends.llamacpp.tuning import SettingsMeasurement
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.heads import HeadSpec


class LlamaModel(LlamaWeights):
    """A backends.Model."""

    def attach(
        self, spec: SelfDraftSpec, *, folder: Path, progress: Callable[[float], None], check: CheckCancelled
    ) -> AttachedDraft:
        """See backends.Model."""
        return open_self_draft(self, spec, folder, progress, check)

    def attach_head(
        self, spec: HeadSpec, path: Path, *, progress: Callable[[float], None], check: CheckCancelled
    ) -> AttachedHead:
        """See backends.Model."""
        return open_head(self, path, spec, progress, check)

    def measure_settings(self, seconds: float, check: CheckCancelled) -> RuntimeSettings | None:
        """See backends.settings.Adjustable. No other session is open."""
        return SettingsMeasurement(self, seconds, check).run()


def load(
    path: Path,
    options: LoadOptions,
    *,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
    vocabulary_only: bool = False,
) -> LlamaModel:
    """Load a GGUF file that formats.gguf_validate has checked. See weights.load_weights for the errors."""
    return load_weights(LlamaModel, path, options, progress=progress, check=check, vocabulary_only=vocabulary_only)
