"""Trained heads on MLX, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from edgespec.backends.attached_draft import OTHER_HEAD, AttachedHead, Unsupported
from edgespec.backends.head_session import BlockHeadSession, HeadSession, check_hidden_size
from edgespec.backends.mlx.heads.assistant import read_assistant
from edgespec.backends.mlx.heads.draft_vocabulary import ShortVocabulary, choose_frequent
from edgespec.backends.mlx.heads.medusa import read_hydra, read_medusa
from edgespec.backends.mlx.heads.networks import BlockNetwork, read_pairs
from edgespec.backends.mlx.heads.runner import HeadNetwork, NetworkRunner
from edgespec.backends.mlx.heads.target_parts import TargetParts, read_target
from edgespec.backends.mlx.heads.weights import read_arrays
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import Session
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.text.tokenizer import Tokenizer

SHARE = 4  # one in so many tokens is kept
_LEAST = 65_536  # tokens; a quarter of smaller vocabularies lacks one in seven tokens of an English text
_DRAFTED = 3  # tokens of a usual round, one in each forward of a head that reads pairs

Opener = type[HeadSession] | type[BlockHeadSession]

Reader = Callable[[Path, HeadSpec, Mapping[str, Any], TargetParts], HeadNetwork]
"""Makes a network of a folder's config.json and arrays.

Raises Unsupported for a head that the target does not fit, InvalidModelFile, CacheError, BackendError.
"""

_KINDS: dict[HeadKind, tuple[Reader, Opener]] = {
    "eagle3": (read_pairs, HeadSession),
    "eagle": (read_pairs, HeadSession),
    "mtp": (read_pairs, HeadSession),
    "gemma4-assistant": (read_assistant, HeadSession),
    "dflash": (BlockNetwork, BlockHeadSession),
    "dspark": (BlockNetwork, HeadSession),
    "medusa": (read_medusa, BlockHeadSession),
    "hydra": (read_hydra, HeadSession),
}


class MlxHead(AttachedHead):
    """A head beside its target."""

    def __init__(
        self, kind: HeadKind, network: HeadNetwork, opener: Opener, tokenizer: Tokenizer, target_bytes: int
    ) -> None:
        super().__init__(kind, tokenizer, network.nbytes)
        self._target_bytes = target_bytes
        self.network = network
        self.opener = opener

    def shorten(self) -> None:
        """Gives the network a short vocabulary too, if it scores many tokens.

        A forward takes about as long as it takes to read its weights, so the bytes that a round does not read tell what
        share of its time is saved. Half of that is counted on, since not all of the time is spent on reading.
        """
        network, vocabulary = self.network, self.network.vocabulary
        if vocabulary.ids is not None or vocabulary.vocab_size < _LEAST:
            return
        ids = choose_frequent(self.tokenizer, vocabulary.vocab_size // SHARE)
        try:
            with map_errors():
                short = network.shorten(mx.array(ids))
        except Unsupported:  # another kind of output matrix
            return
        forwards = _DRAFTED if network.reads_pairs else 1
        whole = self._target_bytes + forwards * (network.nbytes + SHARE * short.nbytes)
        saved = forwards * (SHARE - 1) * short.nbytes / whole / 2
        network.short = ShortVocabulary(short, np.isin(np.arange(vocabulary.vocab_size), ids), saved)
        self.extra_bytes += short.nbytes

    def open_session(self, target: Session) -> DraftSession | BlockSession:
        """Opens a session. Raises ValueError if `target` holds tokens."""
        assert isinstance(target, MlxSession)
        return self.opener(NetworkRunner(self.network, target), target, target.tap(self.network.layers))

    def close(self) -> None:
        del self.network
        mx.clear_cache()


def open_head(model: Any, n_layers: int, tokenizer: Tokenizer, path: Path, spec: HeadSpec) -> MlxHead:
    """Load the head in a folder, which `spec` describes, for mlx-lm's `model` with `n_layers` and `tokenizer`.

    Raises Unsupported for a head of another target or kind, InvalidModelFile, BackendError.
    """
    if spec.kind not in _KINDS or not path.is_dir():
        raise Unsupported(
            f"MLX runs heads in folders with config.json and safetensors, of the kinds {', '.join(_KINDS)}.",
            hint=OTHER_HEAD,
        )
    read, opener = _KINDS[spec.kind]
    spec, target = spec.complete(n_layers), read_target(model)
    check_hidden_size(path.name, spec, target.hidden_size)
    target_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return MlxHead(spec.kind, read(path, spec, read_arrays(path), target), opener, tokenizer, target_bytes)
