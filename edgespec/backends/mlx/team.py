"""The ranks of MLX that compute one model together: what they tell each other, and how a model is split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.rank_link import Follower, Leader
from edgespec.backends.ranks import Ranks, take_ranks
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, Cancelled, ContextOverflow, InvalidRequest, RollbackError, reason_of

REFUSALS = (Cancelled, ContextOverflow, RollbackError, Unsupported, ValueError)
"""What an operation raises on all ranks alike."""


class Team(Protocol):
    """A rank among the others. All ranks run the same operations in the same order; rank 0 decides which."""

    @property
    def group(self) -> Any:
        """MLX's group."""

    def announce(self, do: str, **arguments: Any) -> None:
        """Rank 0: have the others run this operation, which this process is about to run. Raises BackendError."""

    def watch(self, check: CheckCancelled) -> CheckCancelled:
        """A check that raises Cancelled on all ranks at the same point; `check` is rank 0's."""

    def leave(self) -> None:
        """The ranks are out of step: an operation has failed in the middle."""

    def share(self, x: Any) -> Any:
        """Rank 0's `x`, which has the same shape everywhere; a lazy array."""


class LeadingTeam:
    """Rank 0."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        leader.tell("join")
        self.group = join(leader.ranks)

    def announce(self, do: str, **arguments: Any) -> None:
        self.leader.tell(do, **arguments)

    def watch(self, check: CheckCancelled) -> CheckCancelled:
        def watched() -> None:
            try:
                check()
            except BaseException:
                self.leader.tell("stop")
                raise
            self.leader.tell("go")

        return watched

    def leave(self) -> None:
        self.leader.close()

    def share(self, x: Any) -> Any:
        return mx.distributed.all_sum(x, group=self.group)


class FollowingTeam:
    """Another rank."""

    def __init__(self, link: Follower, ranks: Ranks) -> None:
        self._link = link
        self.group = join(ranks)

    def announce(self, do: str, **arguments: Any) -> None:
        """Rank 0 has announced it."""

    def watch(self, check: CheckCancelled) -> CheckCancelled:
        def watched() -> None:
            answer = self._link.receive()["do"]
            if answer == "stop":
                raise Cancelled
            if answer != "go":
                raise BackendError(f"{answer!a} came in the middle of an operation.", hint="Report this as a bug.")

        return watched

    def leave(self) -> None:
        """Rank 0 hears of the error."""

    def share(self, x: Any) -> Any:
        zeros = mx.depends(mx.zeros_like(x), x)  # what `x` takes is computed here too, as on rank 0
        return mx.distributed.all_sum(zeros, group=self.group)


@contextmanager
def mirrored(team: Team, do: str, **arguments: Any) -> Iterator[None]:
    """Inside, all ranks run the operation `do`. Raises BackendError."""
    team.announce(do, **arguments)
    try:
        yield
    except REFUSALS:
        raise
    except BaseException:
        team.leave()
        raise


@cache
def join(ranks: Ranks) -> Any:
    """MLX's group of all ranks, which a process can join once. Raises BackendError."""
    ranks.export()
    try:
        with map_errors():
            return mx.distributed.init(backend=ranks.backend, strict=True)
    finally:
        take_ranks()  # the children of this process are no ranks


def split(model: Any, group: Any) -> None:
    """Leave this rank's part of a model whose weights have not been read. Raises InvalidRequest."""
    size = group.size()
    if not hasattr(model, "shard"):
        raise InvalidRequest(
            f"mlx-lm cannot split a model of type {model.model_type} among machines.",
            hint="Run it on one machine, or on several with llama.cpp: `edgespec worker --help`.",
        )
    arguments = getattr(getattr(model, "language_model", model), "args", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(arguments, name, None)
        if isinstance(heads, int) and heads % size:
            kind = "attention" if name == "num_attention_heads" else "key-value"
            raise InvalidRequest(f"{size} ranks cannot share {heads} {kind} heads.", hint=_suggest(heads, size))
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        raise InvalidRequest(
            f"mlx-lm cannot split this model among {size} ranks: {reason_of(error)}.",
            hint="Use another number of ranks.",
        ) from error


def find_split_output(model: Any) -> bool:
    """Whether each rank has a part of the model's output matrix."""
    kinds = (AllToShardedLinear, QuantizedAllToShardedLinear)
    return any(isinstance(each, kinds) for name, each in model.named_modules() if name.rsplit(".", 1)[-1] == "lm_head")


def _suggest(heads: int, size: int) -> str:
    fitting = [n for n in range(1, size) if heads % n == 0]
    return f"Use {fitting[-1]} {'rank' if fitting[-1] == 1 else 'ranks'}."
