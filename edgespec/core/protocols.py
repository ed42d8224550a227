"""Contracts between the loop and everything it drives; shapes and meaning are stated here once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from edgespec.core.arrays import Ints, Logits, Probs
from edgespec.core.batching import BatchPeers, Yield
from edgespec.core.sampling import SamplingParams

CheckCancelled = Callable[[], None]
"""Returns, or raises `edgespec.errors.Cancelled`; cheap enough to call between any two operations."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Provisional tokens: a chain, or a tree below the root (the last emitted token, which is not part of it).

    tokens   [n] int32 ids
    parents  [n] int32; parents[i] < i, and -1 stands for the root, so nodes come in topological order
    q        [n, V] the law each token was actually drawn from, given its earlier siblings were rejected;
             None for deterministic children (n-gram, greedy, top-k), whose siblings are distinct
    """

    tokens: Ints
    parents: Ints
    q: Probs | None = None

    @staticmethod
    def chain(tokens: Sequence[int], q: Probs | None = None) -> Draft:
        """A draft in which every token follows the one before it."""
        return Draft(np.asarray(tokens, np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int32), q)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        n = len(self.parents)
        return n == 0 or bool((self.parents == np.arange(-1, n - 1)).all())

    def children(self, node: int) -> list[int]:
        """Nodes below `node` (-1: the root) in draft order."""
        found: list[int] = np.flatnonzero(self.parents == node).tolist()
        return found


NO_DRAFT = Draft.chain(())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted root-to-node path of a draft, and the token that the target emits after it."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What a drafter may spend: `depth` tokens below the root on any path, `nodes` tokens in all.

    More nodes than depth invite a tree: siblings beside the first choice.
    """

    depth: int
    nodes: int

    def clamp(self, *, depth: int, nodes: int) -> Budget:
        """At most `depth` and `nodes`; what invited a chain still does."""
        clamped = max(0, min(self.depth, depth))
        most = self.nodes if self.nodes > self.depth else min(self.nodes, clamped)
        return Budget(clamped, max(0, min(most, nodes)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a session can do; `hidden_layers` are the layers whose features `Scores.hidden` may carry.

    follows    it drafts beside another session, holds all that this one holds, and need not read it
    """

    vocab_size: int
    context_size: int
    tree: bool
    hidden_layers: frozenset[int]
    shares_kv: bool = False


class Scores(Protocol):
    """Target scores of one forward. Row 0 is the root, row i + 1 is draft node i. Valid until commit or prefill.

    A runtime with a device may return them before the forward has finished, a session that shares its forwards before
    it has begun; the first read waits for it.
    """

    @property
    def waited_s(self) -> float:
        """Seconds that reads have waited so far for the forward to finish."""

    @property
    def peer_wait_s(self) -> float:
        """Seconds that another session's read has waited for the same forward; 0 where one of these did."""

    @property
    def peer_rows(self) -> int | None:
        """Rows of other sessions in the same forward; None where prompts are read in it."""

    def argmax(self) -> Ints:
        """[rows] the best id of each row; ties go to the lowest id."""

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        """[rows] tokens that the inverse of each row's cumulative law gives for `uniforms` [rows], without its logits.

        -1 marks a row where rounding could decide otherwise; None where this runtime leaves drawing to
        `Sampler.distribution`.
        `params` have neither penalties nor bias.
        """

    def logits(self, row: int) -> Logits:
        """[V] raw scores of one row; a view that the caller must not write to."""

    def hidden(self) -> object:
        """Features for trained heads, or None."""


class Session(Protocol):
    """One model with its KV state for one sequence.

    forward() scores provisional tokens, commit() keeps one path of them. `position` counts the tokens in the cache;
    after commit it is len(history) - 1, because the last emitted token is the next root and not yet cached.
    Cancelled raised from prefill, forward, commit or a read of scores leaves a session that can be rewound and given a
    prompt; any other error dirties it: close it.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def position(self) -> int: ...

    @property
    def draft_limit(self) -> int:
        """Draft nodes that the next forward can take, beside its root; 0 at the end of the context."""

    @property
    def peers(self) -> BatchPeers:
        """Whom the next forward will be shared with."""

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Bring the cache to exactly `tokens`, reusing the longest prefix it can; returns scores of the last (one row).

        Yields after every chunk. Raises ContextOverflow, Cancelled.
        """

    def adopt(self, other: Session, n: int) -> bool:
        """Hold the first `n` tokens that `other`, a session of the same model, holds (or what there is of them), and
        nothing else, without computing them; whether that was possible. Where not, nothing has changed.
        """

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        """Score the root and every draft node. len(draft) <= draft_limit; a tree needs capabilities.tree.

        `run_ahead` says that the emitted token will probably be forwarded next, without a draft: a runtime with a
        device may start on it before the host has read it.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` (root to node) of the last forward; forget the rest."""

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        """Run `tokens`, then continue greedily: a chain of the `n` best tokens below `vocab_size`, all fed back but the
        last. Row i of the scores is what token i was chosen from.

        The cache then holds `tokens`, made a checkpoint, and n - 1 drafted ones, for which the context must have room.
        len(tokens) - 1 <= draft_limit. A runtime with a device may return before it has finished; reading the tokens
        waits for it.
        """

    def checkpoint(self) -> None:
        """Make the current position one that rewind() can reach; free where the cache can be cut anywhere."""

    def rewind(self, position: int) -> int:
        """Cut the cache back to at most `position` tokens; returns how many are left (fewer on recurrent models)."""

    def close(self) -> None: ...


class Drafter(Protocol):
    """Anything that proposes a draft, for one generation. Sessions that it drives belong to the engine."""

    @property
    def name(self) -> str: ...

    @property
    def hidden_layers(self) -> frozenset[int]: ...

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        """A generation starts; `scores` are the target's for the last prompt token."""

    def propose(self, tokens: Sequence[int], budget: Budget) -> Draft:
        """A draft that continues `tokens` (prompt and all emitted; the last one is the root) within `budget`."""

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        """What became of the last proposal, after clipping at stop tokens and length."""


class Verifier(Protocol):
    """An exact acceptance rule: the tokens it lets through follow the target's distribution, whatever was drafted."""

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict: ...


class Controller(Protocol):
    """Decides each round who drafts and how much, and has it drafted; for one generation."""

    @property
    def decision(self) -> Decision:
        """Why the last proposal was made."""

    @property
    def expects_plain(self) -> bool:
        """Whether the round after this one will probably have no draft."""

    def begin(self, prompt: Sequence[int], scores: Scores) -> None:
        """A generation starts; `scores` are the target's for the last prompt token."""

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        """A draft that continues `tokens` (prompt and all emitted; the last one is the root), or none.

        The session takes no more than `limit`.
        """

    def observe(self, verdict: Verdict, scores: Scores) -> None:
        """What became of the last proposal, after clipping at stop tokens and length."""

    def record(self, step: Step) -> None:
        """What the round took and won."""

    def set_phase(self, phase: str) -> None:
        """The text goes over into 'reasoning' or 'answer', in which drafts may fare differently."""

    def warning(self) -> str | None:
        """A sentence for the user if a drafter does so badly, or so much worse than before, that something is wrong."""

    def end(self) -> None:
        """The generation is over, whatever became of it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round was to be, and why.

    source      who drafts: 'none', or names of drafters joined by '+'
    expected_*  tokens emitted and seconds taken, where the controller estimates them
    walked      tokens that a draft model drafted for it one by one, verified or not
    """

    source: str
    reason: str
    expected_tokens: float | None = None
    expected_s: float | None = None
    walked: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One burst of emitted tokens. Step 0 is the token that prefill yields; every other step is one target forward.

    tokens      the first n_accepted of them were drafted, the rest is the target's own
    n_tested    depths at which a drafted token met the target's verdict: n_accepted, plus 1 after a rejection
    n_beside    rows of other generations in the same forward; None where a step of one of those tells of it, or where
                its seconds are those of something else too, such as a prompt
    at_s        time.perf_counter() when the tokens were ready; the other times are durations in seconds
    decision    why the round drafted what it did; None for step 0
    plain_s     what a token would have taken then in plain decoding beside the same generations, where its usual
                seconds are known: a forward that took twice what such a forward usually takes would have done so then
    """

    index: int
    tokens: tuple[int, ...]
    n_drafted: int
    n_accepted: int
    n_tested: int
    at_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    decision: Decision | None = None
    n_peer_rows: int | None = 0
    plain_s: float | None = None

    def forward_s(self, n_generations: int) -> float:
        """Seconds of a forward of `n_generations` with all their sampling, which takes each about as long."""
        return self.verify_s + (self.sample_s + self.commit_s) * n_generations


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens in the cache so far, of all; `reused` of them were there before."""

    done: int
    total: int
    reused: int = 0


FinishReason = Literal["stop", "length", "cancelled"]
