"""The ranks of MLX that compute one model together: what they tell each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from time import sleep
from typing import Any

import mlx.core as mx

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.mlx.library import map_errors
from edgespec.cancel import check_cancelled
from edgespec.errors import BackendError, Cancelled, ContextOverflow, InvalidRequest, RollbackError, reason_of
from edgespec.machines.ranks import Ranks, take_ranks
from edgespec.machines.wire import Follower, Leader

_LOST_S = 0.5  # wait after an error: if a rank that has ended caused it, its connection ends this process meanwhile
REFUSALS = (Cancelled, ContextOverflow, RollbackError, Unsupported, ValueError)
"""What an operation raises on all ranks alike."""


class Team(ABC):
    """A rank among the others. All ranks run the same operations in the same order; rank 0 decides which."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = join(ranks)

    def announce(self, do: str, **arguments: Any) -> None:  # noqa: B027 - the others hear of it from rank 0
        """Rank 0: have the others run this operation, which this process is about to run. Raises BackendError."""

    @abstractmethod
    def poll(self) -> None:
        """Raises Cancelled on all ranks at the same point, if rank 0's work is cancelled."""

    def leave(self) -> None:  # noqa: B027 - rank 0 hears of the error
        """Called when an operation has failed in the middle, so that the ranks are out of step."""

    def share(self, x: Any) -> Any:
        """Rank 0's `x`, which has the same shape everywhere; a lazy array."""
        return mx.distributed.all_sum(x, group=self.group)


class LeadingTeam(Team):
    """Rank 0."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        leader.tell("join")
        super().__init__(leader.ranks)

    def announce(self, do: str, **arguments: Any) -> None:
        self.leader.tell(do, **arguments)

    def poll(self) -> None:
        try:
            check_cancelled()
        except BaseException:
            self.leader.tell("stop")
            raise
        self.leader.tell("go")

    def leave(self) -> None:
        sleep(_LOST_S)
        self.leader.close()


class FollowingTeam(Team):
    """Another rank."""

    def __init__(self, link: Follower, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._link = link

    def poll(self) -> None:
        answer = self._link.receive()["do"]
        if answer == "stop":
            raise Cancelled
        if answer != "go":
            raise BackendError(f"{answer!a} came in the middle of an operation.", hint="Report this as a bug.")

    def share(self, x: Any) -> Any:
        return super().share(mx.depends(mx.zeros_like(x), x))  # what `x` takes is computed here too, as on rank 0


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
    heads = [getattr(arguments, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if any(isinstance(count, int) and count % size for count in heads):  # which mlx-lm does not check
        raise InvalidRequest(
            f"{size} ranks cannot share {heads[0]} attention heads and {heads[1]} key-value heads.",
            hint="Use another number of ranks.",
        )
    try:
        model.shard(group)
    except (ValueError, AssertionError) as error:
        raise InvalidRequest(
            f"mlx-lm cannot split this model among {size} ranks: {reason_of(error)}.",
            hint="Use another number of ranks.",
        ) from error
