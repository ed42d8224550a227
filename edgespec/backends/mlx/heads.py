"""Trained heads on MLX, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.head_session import BlockHeadSession, HeadSession
from edgespec.backends.mlx.head_networks import BlockNetwork, read_assistant, read_hydra, read_medusa, read_pairs
from edgespec.backends.mlx.head_parts import ShortVocabulary, TargetParts, choose_frequent, read_arrays, read_target
from edgespec.backends.mlx.head_runner import HeadNetwork, NetworkRunner
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.verify import read_prompt
from edgespec.formats.heads import HeadKind, HeadSpec, usual_layers
from edgespec.text.tokenizer import Tokenizer

SHARE = 4  # one in so many tokens is kept
_LEAST = 65_536  # tokens; a quarter of smaller vocabularies lacks one in seven tokens of an English text
_TEXT, _DRAFT, _REPEATS = 8, 3, 3  # tokens of the text and of a draft; rounds, of which the shortest counts

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

    def __init__(self, kind: HeadKind, network: HeadNetwork, opener: Opener, tokenizer: Tokenizer) -> None:
        super().__init__(kind, tokenizer, network.nbytes)
        self.network = network
        self.opener = opener

    def adjust(self, open_target: Callable[[CheckCancelled], Session], check: CheckCancelled) -> None:
        """Gives the network a short vocabulary, if it scores many tokens and a round is shorter so."""
        network, vocabulary = self.network, self.network.vocabulary
        if vocabulary.ids is not None or vocabulary.vocab_size < _LEAST:
            return
        ids, before = choose_frequent(self.tokenizer, vocabulary.vocab_size // SHARE), int(mx.get_active_memory())
        try:
            short = network.shorten(mx.array(ids))
        except ValueError:  # another kind of output matrix
            return
        (draft_s, target_s), (short_s, _) = (self.time_round(each, open_target, check) for each in (network, short))
        saved = (draft_s - short_s) / (draft_s + target_s)
        if saved > 0:
            network.short = ShortVocabulary(short, np.isin(np.arange(vocabulary.vocab_size), ids), saved)
            self.extra_bytes += int(mx.get_active_memory()) - before

    def time_round(
        self, network: HeadNetwork, open_target: Callable[[CheckCancelled], Session], check: CheckCancelled
    ) -> tuple[float, float]:
        """(seconds of a draft of three tokens, seconds of the target's forward on it)"""
        text, times = list(range(_TEXT)), []
        with ExitStack() as closing:
            session = open_target(check)
            closing.callback(session.close)
            assert isinstance(session, MlxSession)
            draft = self._open(network, session, check)
            closing.callback(draft.close)
            read_prompt(session, text[:-1])
            draft.begin(text)
            for _ in range(_REPEATS):
                check()
                started = perf_counter()
                tokens = _draft(draft, text)
                drafted = perf_counter()
                next_token = int(session.forward(text[-1], Draft.chain(tokens)).argmax()[0])
                times.append((drafted - started, perf_counter() - drafted))
                session.commit(())
                text.append(next_token)
        first, second = zip(*times, strict=True)
        return min(first), min(second)

    def open_session(self, target: Session, check: CheckCancelled) -> DraftSession | BlockSession:
        """Opens a session. Raises ValueError where `target` holds tokens."""
        assert isinstance(target, MlxSession)
        return self._open(self.network, target, check)

    def _open(self, network: HeadNetwork, target: MlxSession, check: CheckCancelled) -> HeadSession | BlockHeadSession:
        return self.opener(NetworkRunner(network, target, check), target, target.tap(network.layers))

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
            hint="Use a head that was trained for this model, or --draft auto.",
        )
    read, opener = _KINDS[spec.kind]
    if spec.layers is None:
        spec = replace(spec, layers=usual_layers(n_layers))
    target = read_target(model)
    target.check(spec)
    return MlxHead(spec.kind, read(path, spec, read_arrays(path), target), opener, tokenizer)


def _draft(draft: DraftSession | BlockSession, text: list[int]) -> list[int]:
    """Draft at most three tokens after `text` and read them from the device."""
    if isinstance(draft, BlockSession):
        return [int(row.argmax()) for row in draft.block(text, len(text), _DRAFT) or ()]
    found = draft.rollout(text, len(text), _DRAFT)
    return [] if found is None else found[0].tokens.tolist()
