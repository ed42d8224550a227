"""Trained heads on MLX, by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.mlx.assistant import AssistantSession
from edgespec.backends.mlx.assistant import read_network as read_assistant
from edgespec.backends.mlx.dflash import DFlashSession
from edgespec.backends.mlx.dflash_network import read_network as read_dflash
from edgespec.backends.mlx.draft_vocabulary import ScoringNetwork
from edgespec.backends.mlx.dspark import DSparkSession
from edgespec.backends.mlx.dspark import read_network as read_dspark
from edgespec.backends.mlx.eagle import read_network as read_eagle
from edgespec.backends.mlx.eagle3 import read_network as read_eagle3
from edgespec.backends.mlx.hydra import HydraSession
from edgespec.backends.mlx.hydra import read_network as read_hydra
from edgespec.backends.mlx.medusa import MedusaSession
from edgespec.backends.mlx.medusa import read_network as read_medusa
from edgespec.backends.mlx.mtp import read_network as read_mtp
from edgespec.backends.mlx.pair_session import PairSession
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.short_vocabulary import Opener, shorten
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.formats.heads import HeadKind, HeadSpec, usual_layers
from edgespec.text.tokenizer import Tokenizer


class HeadNetwork(ScoringNetwork, Protocol):
    """The weights of a head.

    layers  of the target, whose hidden states it reads; as formats.heads.HeadSpec
    nbytes  of its own weights
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


Reader = Callable[[Path, HeadSpec, Any], HeadNetwork]
"""Reads the head of a spec from its folder, for mlx-lm's model. Raises Unsupported, InvalidModelFile, BackendError."""

_KINDS: dict[HeadKind, tuple[Reader, Opener]] = {
    "eagle3": (read_eagle3, PairSession),
    "eagle": (read_eagle, PairSession),
    "mtp": (read_mtp, PairSession),
    "gemma4-assistant": (read_assistant, AssistantSession),
    "dflash": (read_dflash, DFlashSession),
    "dspark": (read_dspark, DSparkSession),
    "medusa": (read_medusa, MedusaSession),
    "hydra": (read_hydra, HydraSession),
}


class MlxHead(AttachedHead):
    """A head beside its target."""

    def __init__(self, kind: HeadKind, network: HeadNetwork, opener: Opener, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name = "mtp" if kind == "gemma4-assistant" else kind
        self.shares_kv = kind == "gemma4-assistant"
        self.extra_bytes = network.nbytes
        self._network = network
        self.opener = opener

    @property
    def network(self) -> ScoringNetwork:
        """What it runs."""
        return self._network

    def adjust(self, open_target: Callable[[CheckCancelled], Session], check: CheckCancelled) -> None:
        """See AttachedHead: score frequent tokens alone where that pays."""
        self.extra_bytes += shorten(self._network, self.opener, open_target, self.tokenizer, check)

    def open_session(self, target: Session, check: CheckCancelled) -> DraftSession | BlockSession:
        """For `target`, which holds no tokens yet. Raises ValueError, BackendError, Unsupported."""
        assert isinstance(target, MlxSession)
        return self.opener(self._network, target, target.tap(self._network.layers), check)

    def close(self) -> None:
        del self._network
        mx.clear_cache()


def open_head(model: Any, n_layers: int, tokenizer: Tokenizer, path: Path, spec: HeadSpec) -> MlxHead:
    """Load the head in a folder, which `spec` describes, for mlx-lm's `model` with `n_layers` and `tokenizer`.

    Raises Unsupported for a head of another target or kind, InvalidModelFile, BackendError.
    """
    if spec.kind not in _KINDS or not path.is_dir():
        raise Unsupported(
            f"MLX runs heads in folders with config.json and safetensors, of the kinds {', '.join(_KINDS)}.",
            hint="Use a head that was trained for this model, or --draft auto.",
        )
    read, opener = _KINDS[spec.kind]
    if spec.layers is None:
        spec = replace(spec, layers=usual_layers(n_layers))
    return MlxHead(spec.kind, read(path, spec, model), opener, tokenizer)
