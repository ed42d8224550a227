"""The contracts between the decoding loop and its parts: data, shapes, units and errors, stated here once.

n is a number of draft nodes, V the vocabulary size, p the target's distribution, q the draft's. Durations end in `_s`
and are in seconds.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from edgespec.core.arrays import Ints, Probs
from edgespec.core.peers import BatchPeers, Yield
from edgespec.core.scores import Scores


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens: a chain, or a tree below the root. The root is the last emitted token and not part of the draft.

    tokens   [n] int32 ids
    parents  [n] int32; parents[i] < i, and -1 is the root, so nodes are in topological order
    q        [n, V] the distribution that each token was sampled from, given that its earlier siblings were rejected;
             None for deterministic tokens (n-gram, greedy, top-k), whose siblings are distinct
    drafters [n] the names of the drafters that proposed each token, joined by '+'; if empty, `Decision.drafter` names
             the drafter of all tokens
    """

    tokens: Ints
    parents: Ints
    q: Probs | None = None
    drafters: tuple[str, ...] = ()

    @staticmethod
    def chain(tokens: Sequence[int], q: Probs | None = None) -> Draft:
        """A draft in which every token follows the one before it."""
        return Draft(np.asarray(tokens, np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int32), q)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        """A deterministic draft of these nodes and `tokens`, whose `parents` are nodes of both."""
        more = np.asarray(tokens, np.int32), np.asarray(parents, np.int32)
        return Draft(np.concatenate([self.tokens, more[0]]), np.concatenate([self.parents, more[1]]))

    @property
    def is_chain(self) -> bool:
        n = len(self.parents)
        return n == 0 or bool((self.parents == np.arange(-1, n - 1)).all())

    def children(self, node: int) -> list[int]:
        """The nodes below `node` (-1: the root), in draft order."""
        found: list[int] = np.flatnonzero(self.parents == node).tolist() if len(self.parents) else []
        return found


NO_DRAFT = Draft.chain(())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted `path` of a draft, as nodes from the root's child down, and the token that the target emits next:
    the correction after a rejection, or the bonus token after full acceptance.
    """

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round. Rounds whose draft a grammar forced, and rounds without a draft, have one too.

    text      prompt and all emitted tokens, those of this round included
    emitted   the tokens of this round
    draft     what the target has scored
    path      the accepted nodes of the draft, cut where the text ends
    n_tested  depths at which a drafted token was compared: the accepted ones, plus 1 after a rejection
    scores    the target's: row 0 is the root, row i + 1 is draft node i; valid during the call only. None if plain
              steps are so short that learning from scores would not pay, and where several rounds are reported as one
    """

    text: Sequence[int]
    emitted: tuple[int, ...]
    draft: Draft
    path: tuple[int, ...]
    n_tested: int
    scores: Scores | None


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a draft: `depth` tokens on any path below the root, `nodes` tokens in all.

    A budget with more nodes than depth asks for a tree. `read` limits the tokens of the text that a drafter reads
    first; None for no limit. A path that is less probable than `reach`, by the drafter's confidences, may end there.
    """

    depth: int
    nodes: int
    read: int | None = None
    reach: float = 0.0

    @property
    def has_branches(self) -> bool:
        """Whether a drafter may continue several paths. At most one path is more probable than 1/2, so a higher
        `reach` leaves one.
        """
        return self.nodes > self.depth and self.reach <= 0.5


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a session supports.

    vocab_size     V, the number of scores in a row
    context_size   tokens that the KV cache holds
    tree           whether forward() takes trees
    shares_kv      whether this is a draft session on another session's KV cache; it need not read that session's tokens
    """

    vocab_size: int
    context_size: int
    tree: bool
    shares_kv: bool = False


class Session(Protocol):
    """One model with its KV cache for one sequence.

    forward() scores provisional tokens, commit() keeps one path of them. `position` is the number of tokens in the
    cache. After a commit it is len(history) - 1: the last emitted token is the next root and not cached yet.

    After Cancelled from prefill, forward, commit or a read of scores, the session can be rewound and prefilled again.
    After any other error its state is unknown: close it.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def position(self) -> int: ...

    @property
    def draft_limit(self) -> int:
        """The most draft nodes that the next forward takes, the root not counted; 0 at the end of the context."""

    @property
    def peers(self) -> BatchPeers:
        """The sessions that the next forward will be shared with."""

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Make the cache hold exactly `tokens`, reusing the longest prefix it can; returns one row, the last token's.

        Yields after every chunk. Raises ContextOverflow, Cancelled, BackendError.
        """

    def adopt(self, other: Session, n: int) -> bool:
        """Copy the first `n` tokens, or all, from the cache of `other`, a session of the same model; returns whether
        that was possible. If not, nothing has changed.
        """

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        """Score the root and every draft node: 1 + n rows. n is at most draft_limit; a tree needs capabilities.tree.

        `run_ahead` announces that the emitted token will probably be forwarded next without a draft, so that a device
        may start on it before the host has read it. Raises ValueError for an invalid draft, Cancelled, BackendError.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path` of the last forward, and discard the rest."""

    def checkpoint(self) -> None:
        """Make the current position reachable by rewind(); free for caches that can be cut anywhere."""

    def rewind(self, position: int) -> int:
        """Cut the cache to `position` tokens; returns the number of tokens that are left.

        A recurrent cache goes back to its last checkpoint at or before `position`.
        """

    def close(self) -> None: ...


@runtime_checkable
class AsyncSession(Protocol):
    """A session of a draft whose device need not wait for the host between the tokens of a chain."""

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        """Run `tokens`, then decode greedily: a chain of `n` tokens, each the best id below `vocab_size`.

        Row i of the scores is the one that token i was chosen from. The cache then holds `tokens`, with a checkpoint
        after them, and the first n - 1 drafted tokens; all must fit the context, and len(tokens) - 1 <= draft_limit.
        The device may still be at work when it returns; reading the tokens waits.
        """


@runtime_checkable
class Movable(Protocol):
    """A session that shares forwards with others and then takes chains only, but may take trees while it is alone."""

    def settle(self, *, alone: bool) -> None:
        """Called between rounds; `alone` tells whether no other session is in use. `capabilities` may change.

        Raises BackendError.
        """


@runtime_checkable
class Storable(Protocol):
    """A session whose cache can be kept in a file."""

    @property
    def can_cut(self) -> bool:
        """Whether a cache that was restored can go back to any of its tokens; else to its end alone."""

    def save_state(self, limit: int) -> memoryview | None:
        """The bytes of the cache of all `position` tokens; None if it cannot be saved, or has more than `limit` bytes.

        Raises BackendError.
        """

    def restore_state(self, tokens: Sequence[int], state: memoryview) -> bool | None:
        """Load the cache of `tokens` from `state`, which a session of the same model and settings has saved.

        The memory of `state` is writable. Returns True if the cache was loaded, and False if it could not be: it is
        empty then. None means that it cannot be loaded now; the cache is as it was. Raises BackendError.
        """


class Verifier(Protocol):
    """An exact acceptance rule: the emitted tokens follow the target's distribution for any draft."""

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        """`prefix` is prompt and output, the root included. Raises ValueError for a draft that the rule cannot take."""


class Controller(Protocol):
    """Chooses drafters and a draft size in every round of one generation, and returns the draft."""

    @property
    def decision(self) -> Decision:
        """What was chosen for the last draft, and why."""

    @property
    def expects_plain(self) -> bool:
        """Whether the round after this one will probably have no draft."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A generation begins: the target has read `prompt`."""

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        """A draft within `limit` that continues `tokens`: prompt and output, the last one being the root."""

    def observe(self, done: Round) -> None:
        """The round that just ended, before its tokens are committed."""

    def record(self, step: Step) -> None:
        """The times and tokens of the round that just ended."""

    def set_phase(self, phase: str) -> None:
        """The output enters `phase`, 'reasoning' or 'answer', in which acceptance may differ."""

    @property
    def failures(self) -> Mapping[str, str]:
        """The drafters that have failed, and why. They are not asked again."""

    def end(self) -> None:
        """The generation is over: completed, cancelled or failed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a controller chose for a round, and why.

    drafter          names joined by '+', or 'none'
    expected_tokens  emitted tokens, None if the controller does not estimate them
    expected_s       seconds of the round, likewise
    drafted          tokens that paid drafters have proposed on their paths, verified or not, by name
    """

    drafter: str
    reason: str
    expected_tokens: float | None = None
    expected_s: float | None = None
    drafted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one round. Step 0 is the token after the prompt; every other step is one target forward.

    tokens       the first n_accepted of them were drafted, the rest are the target's own
    n_tested     depths at which a drafted token was compared: n_accepted, plus 1 after a rejection
    at_s         time.perf_counter() when the tokens were ready
    draft_s      duration of drafting: all of the controller's and the drafters' work since the step before. Likewise
                 verify_s of the forward, sample_s of sampling and verification, commit_s
    decision     the controller's; None for step 0
    n_peer_rows  rows of other generations in the same forward; None if a peer's step reports that forward, or if the
                 seconds include something else, such as a prompt
    plain_steps  steps of plain decoding, with the same peers, that take as long as a forward of this many rows; None
                 if that is unknown
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
    plain_steps: float | None = None

    def forward_s(self, n_generations: int) -> float:
        """Seconds of a forward that `n_generations` share, with their sampling and commits.

        The others are assumed to take as long for sampling and commit as this one.
        """
        return self.verify_s + (self.sample_s + self.commit_s) * n_generations


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens in the cache so far, and in all; `reused` of them were cached before."""

    done: int
    total: int
    reused: int = 0


FinishReason = Literal["stop", "length", "repetition", "cancelled"]
