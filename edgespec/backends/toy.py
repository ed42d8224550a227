"""A small deterministic runtime: linear, tree and recurrent sessions over a hash of the prefix; for tests and docs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, SelfDraftSpec, Unsupported
from edgespec.backends.options import LoadOptions
from edgespec.backends.sequence import (
    Checkpoints,
    check_committed,
    check_forward,
    check_prompt,
    kept_tokens,
    shared_prefix,
)
from edgespec.core.protocols import (
    SOLO,
    Capabilities,
    CheckCancelled,
    Draft,
    PrefillProgress,
    Session,
    Yield,
)
from edgespec.core.sampling import Logits
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import InvalidRequest, UnknownModel
from edgespec.formats.heads import HeadSpec

# Toy sessions: logits are a seeded function of the last tokens, under the same contract as real sessions.


@dataclass(frozen=True)
class ToyModel:
    """A Markov source: logits [V] depend on `seed` and the last `order` tokens; `sharpness` scales them."""

    seed: int = 0
    vocab_size: int = 16
    order: int = 3
    sharpness: float = 2.0

    def logits(self, prefix: Sequence[int]) -> Logits:
        rng = np.random.default_rng(np.array((self.seed, *prefix[-self.order :]), np.uint32))  # a tuple takes long
        return (rng.standard_normal(self.vocab_size) * self.sharpness).astype(np.float32)


Kind = Literal["linear", "tree", "recurrent"]


class ToySession:
    """A session whose cache is trimmed anywhere, for chains or trees, or goes back to checkpoints alone."""

    peers = SOLO

    def __init__(
        self,
        model: ToyModel,
        *,
        kind: Kind = "tree",
        context_size: int = 256,
        chunk: int = 8,
        check: CheckCancelled = lambda: None,
    ) -> None:
        self.model = model
        self.capabilities = Capabilities(model.vocab_size, context_size, kind == "tree")
        self._is_recurrent = kind == "recurrent"
        self._chunk = chunk
        self._check = check
        self._cache: list[int] = []
        self._checkpoints = Checkpoints[None]()
        self._pending: tuple[int, Draft] | None = None

    @property
    def position(self) -> int:
        return len(self._cache)

    @property
    def draft_limit(self) -> int:
        return max(0, self.capabilities.context_size - self.position - 1)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        check_prompt(tokens, self.capabilities)
        done = reused = self.rewind(shared_prefix(self._cache, tokens, len(tokens) - 1))
        while done < len(tokens):
            self._check()
            done = min(done + self._chunk, len(tokens))
            self._cache += tokens[self.position : done]
            yield PrefillProgress(done, len(tokens), reused)
        return HostScores([self.model.logits(self._cache)])

    def adopt(self, other: Session, n: int) -> bool:
        if not isinstance(other, ToySession) or self._is_recurrent:
            return False
        self._pending = None
        self._cache = other._cache[:n]
        return True

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._check()
        check_committed(self._pending)
        check_forward(self, root, draft)
        base = (*self._cache, root)
        prefixes = [base]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        self._pending = (root, draft)
        return HostScores([self.model.logits(prefix) for prefix in prefixes])

    def commit(self, path: Sequence[int]) -> None:
        self._cache += kept_tokens(self._pending, path)
        self._pending = None

    def checkpoint(self) -> None:
        self._checkpoints.add(self.position, None, 0)

    def rewind(self, position: int) -> int:
        self._pending = None
        found = self._checkpoints.cut(position)
        if self._is_recurrent and position < self.position:
            position = found[0] if found is not None else 0
        del self._cache[position:]
        return self.position

    @property
    def can_cut(self) -> bool:
        return not self._is_recurrent

    def save_state(self, limit: int) -> memoryview | None:
        return memoryview(bytes(self.position)) if self.position <= limit else None

    def restore_state(self, tokens: Sequence[int], state: memoryview) -> bool:
        self.rewind(0)
        if len(state) != len(tokens):
            return False
        self._cache = list(tokens)
        self.checkpoint()
        return True

    def close(self) -> None:
        self._cache = []


# The toy runtime as a loadable model: byte tokens and random letters, in linear, tree and recurrent form.


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

    def open_session(self, check: CheckCancelled, *, shared: bool = False) -> Session:
        return ToySession(self._rule, kind=self._kind, context_size=self.context_size, check=check)

    def make_self_draft(
        self, spec: SelfDraftSpec, *, folder: Path, progress: Callable[[float], None], check: CheckCancelled
    ) -> AttachedDraft:
        raise Unsupported("the toy model has no layers to skip.", hint="Use --draft model.")

    def load_head(
        self, spec: HeadSpec, path: Path, *, progress: Callable[[float], None], check: CheckCancelled
    ) -> AttachedHead:
        raise Unsupported("the toy model has no hidden states for a head.", hint="Use --draft model.")

    def open_embedder(self, cells: int, check: CheckCancelled) -> NoReturn:
        raise InvalidRequest("the toy runtime makes no embeddings.", hint="Serve the model with --backend llamacpp.")

    def close(self) -> None: ...


def load(name: str, options: LoadOptions) -> ToyRuntimeModel:
    """Load `linear`, `tree`, `recurrent`, or `draft`, which mostly agrees with them. Raises UnknownModel."""
    if name not in ("linear", "tree", "recurrent", "draft"):
        raise UnknownModel(f"there is no toy model '{name}'.", hint="Use linear, tree, recurrent or draft.")
    return ToyRuntimeModel(name, LetterModel(noise=1.0 if name == "draft" else 0.0), options)
