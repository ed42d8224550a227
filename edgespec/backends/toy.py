"""The toy runtime as a loadable model: byte tokens and random letters, for tests and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np

from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, SelfDraftSpec, Unsupported
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy_session import Kind, ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Session
from edgespec.errors import InvalidRequest, UnknownModel
from edgespec.formats.heads import HeadSpec

_END = 256
_ALPHABET = b"etaoin shrdlu\n"


class ByteTokenizer:
    """One token for each byte, and one that ends the text."""

    vocab_size = 257
    bos: int | None = None
    eos: int | None = _END
    add_bos = False
    end_of_generation = frozenset({_END})
    control_tokens = end_of_generation

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def piece(self, token: int) -> bytes:
        return b"" if token == _END else bytes([token])

    def special_text(self, token: int) -> str:
        return "<end>" if token == _END else f"<{token:#04x}>"


@dataclass(frozen=True)
class LetterModel(ToyModel):
    """Letters by a Markov rule. `noise` perturbs it, for a draft that agrees with the target part of the time."""

    vocab_size: int = 257
    order: int = 2
    sharpness: float = 3.0
    noise: float = 0.0

    def logits(self, prefix: Sequence[int]) -> Logits:
        z = super().logits(prefix)
        if self.noise:
            z = z + np.float32(self.noise) * ToyModel(self.seed + 1, 257, 2, 1.0).logits(prefix)
        return z + self._letters

    @cached_property
    def _letters(self) -> Logits:
        bias = np.full(257, -40.0, np.float32)
        bias[list(_ALPHABET)] = 0.0
        bias[_END] = -4.0
        return bias


class ToyRuntimeModel:
    """A toy model as a backends.Model."""

    is_row_invariant = True
    layer_count = 1
    chat_template: str | None = None
    no_batching_reason: str | None = None

    def __init__(self, name: str, rule: ToyModel, options: LoadOptions) -> None:
        self.tokenizer = ByteTokenizer()
        self.context_size = options.context_size or 4096
        self.description = f"toy ({name})"
        self._rule = rule
        self._kind: Kind = "linear" if name == "linear" else "recurrent" if name == "recurrent" else "tree"
        self.no_tree_reason = None if self._kind == "tree" else "it is the linear or the recurrent toy model"

    def open_session(self, *, shared: bool = False) -> Session:
        return ToySession(self._rule, kind=self._kind, context_size=self.context_size)

    def make_self_draft(self, spec: SelfDraftSpec, *, folder: Path) -> AttachedDraft:
        raise Unsupported("the toy model has no layers to skip.", hint="Use --draft model.")

    def load_head(self, spec: HeadSpec, path: Path) -> AttachedHead:
        raise Unsupported("the toy model has no hidden states for a head.", hint="Use --draft model.")

    def open_embedder(self, cells: int) -> NoReturn:
        raise InvalidRequest("the toy runtime makes no embeddings.", hint="Serve the model with --backend llamacpp.")

    def close(self) -> None: ...


def load(name: str, options: LoadOptions) -> ToyRuntimeModel:
    """Load `linear`, `tree`, `recurrent`, or `draft`, which mostly agrees with them. Raises UnknownModel."""
    if name not in ("linear", "tree", "recurrent", "draft"):
        raise UnknownModel(f"there is no toy model '{name}'.", hint="Use linear, tree, recurrent or draft.")
    return ToyRuntimeModel(name, LetterModel(noise=1.0 if name == "draft" else 0.0), options)
