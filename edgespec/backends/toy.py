"""A small deterministic runtime: linear, tree and recurrent sessions over a hash of the prefix; for tests and docs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np

from edgespec.backends.attached_draft import AttachedDraft, AttachedHead, SelfDraftSpec, Unsupported
from edgespec.backends.options import LoadOptions
from edgespec.backends.sequence import check_forward, check_prompt, shared_prefix
from edgespec.core.protocols import (
    SOLO,
    Capabilities,
    CheckCancelled,
    Draft,
    PrefillProgress,
    Session,
    Yield,
)
from edgespec.core.sampling import Ints, Logits, SamplingParams
from edgespec.core.scores import Scores
from edgespec.core.tree import is_path
from edgespec.core.verify import greedy_rollout
from edgespec.errors import InvalidRequest, RollbackError, UnknownModel
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


@dataclass(frozen=True, slots=True)
class ToyScores:
    """Rows [n + 1, V], computed when a row is asked for."""

    model: ToyModel
    prefixes: tuple[tuple[int, ...], ...]
    waited_s: float = 0.0
    peer_wait_s: float = 0.0
    peer_rows: int = 0

    def argmax(self) -> Ints:
        return np.array([self.logits(row).argmax() for row in range(len(self.prefixes))], np.int32)

    def logits(self, row: int) -> Logits:
        return self.model.logits(self.prefixes[row])

    def host_logits(self, row: int) -> Logits | None:
        return self.logits(row)

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None


class ToySession:
    """A session whose cache can be trimmed anywhere; with `tree` it takes trees. Prefill reads in chunks."""

    peers = SOLO

    def __init__(
        self,
        model: ToyModel,
        *,
        context_size: int = 256,
        tree: bool = True,
        chunk: int = 8,
        check: CheckCancelled = lambda: None,
    ) -> None:
        self.model = model
        self.capabilities = Capabilities(model.vocab_size, context_size, tree)
        self._chunk = chunk
        self._check = check
        self._cache: list[int] = []
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
            self._advance(tokens[self.position : done])
            yield PrefillProgress(done, len(tokens), reused)
        return ToyScores(self.model, (tuple(self._cache),))

    def adopt(self, other: Session, n: int) -> bool:
        if not isinstance(other, ToySession):
            return False
        self.rewind(0)
        self._advance(other._cache[:n])
        return True

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._check()
        if self._pending is not None:
            raise RollbackError("a forward was not committed before the next.", hint="Report this as a bug.")
        check_forward(self, root, draft)
        base = (*self._cache, root)
        prefixes = [base]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        self._pending = (root, draft)
        return ToyScores(self.model, tuple(prefixes))

    def commit(self, path: Sequence[int]) -> None:
        if self._pending is None or not is_path(self._pending[1], tuple(path)):
            raise RollbackError("commit of a path that was not forwarded.", hint="Report this as a bug.")
        root, draft = self._pending
        self._drop_pending()
        self._advance([root, *draft.tokens[list(path)].tolist()])

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        return greedy_rollout(self, tokens, n, vocab_size)

    def checkpoint(self) -> None:
        """Nothing to do: this cache can be trimmed anywhere."""

    def rewind(self, position: int) -> int:
        self._drop_pending()
        del self._cache[position:]
        return self.position

    def close(self) -> None:
        self._cache = []

    def _drop_pending(self) -> None:
        self._pending = None

    def _advance(self, tokens: Sequence[int]) -> None:
        self._cache.extend(tokens)


class RecurrentToySession(ToySession):
    """A session with a recurrent state: chains only; rollback restores a snapshot and replays accepted tokens.

    The state is a digest of all tokens, updated token by token. `replayed` counts the tokens that ran again.
    """

    def __init__(self, model: ToyModel, *, context_size: int = 256, check: CheckCancelled = lambda: None) -> None:
        super().__init__(model, context_size=context_size, tree=False, check=check)
        self._state = 0
        self._state_before = 0  # the state before the pending forward
        self._snapshot = (0, 0)  # (position, state) of the checkpoint
        self.replayed = 0

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        before = self._state
        scores = super().forward(root, draft)
        self._state_before, self._state = before, _digest(before, [root, *draft.tokens.tolist()])
        return scores

    def commit(self, path: Sequence[int]) -> None:
        pending = self._pending
        super().commit(path)
        if pending is not None and len(path) < len(pending[1]):
            self.replayed += 1 + len(path)

    def checkpoint(self) -> None:
        self._snapshot = (self.position, self._state)

    def rewind(self, position: int) -> int:
        self._drop_pending()
        if position < self.position:
            if position < self._snapshot[0]:
                self._snapshot = (0, 0)
            position, self._state = self._snapshot
        return super().rewind(position)

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._state = self._state_before
        super()._drop_pending()

    def _advance(self, tokens: Sequence[int]) -> None:
        self._state = _digest(self._state, tokens)
        super()._advance(tokens)
        assert self._state == _digest(0, self._cache), "the recurrent state does not belong to the cached tokens"


def _digest(state: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        state = (state * 1_000_003 + int(token) + 1) & ((1 << 61) - 1)
    return state


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

    def __init__(self, name: str, rule: ToyModel, options: LoadOptions) -> None:
        self.tokenizer = ByteTokenizer()
        self.chat_template: str | None = None
        self.context_size = options.context_size or 4096
        self.description = f"toy ({name})"
        self.no_batching_reason: str | None = None
        self.no_tree_reason = None if name in ("tree", "draft") else "it is the linear or the recurrent toy model"
        self._rule = rule
        self._name = name

    def open_session(self, check: CheckCancelled, *, shared: bool = False) -> Session:
        if self._name == "recurrent":
            return RecurrentToySession(self._rule, context_size=self.context_size, check=check)
        return ToySession(self._rule, context_size=self.context_size, tree=self._name != "linear", check=check)

    @property
    def layer_count(self) -> int:
        return 1

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
