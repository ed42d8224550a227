"""A model of which each rank has a part. Rank 0 decides; the others run the same operations on their own sessions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.attached_draft import SelfDraftSpec, Unsupported
from edgespec.backends.features import Features
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel, ModelParts, describe, open_parts, read_weights
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.team import Team, find_split_output, mirrored, split
from edgespec.backends.options import LoadOptions
from edgespec.backends.sequence import check_forward, check_prompt
from edgespec.core.batching import Yield
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import CheckCancelled, Draft, PrefillProgress
from edgespec.core.scores import Scores
from edgespec.errors import BackendError
from edgespec.formats.heads import HeadSpec

_REPEATED = ("tap", "untap", "commit", "rollout", "checkpoint", "rewind", "extend", "close")
_OTHER_DRAFT = "Use --draft ngram, or a draft model."


class TeamModel(MlxModel):
    """One rank's part of a model. Every rank makes it with the same arguments."""

    def __init__(self, parts: ModelParts, description: str, team: Team) -> None:
        """Probes the model together with the other ranks. Raises BackendError."""
        self._team = team
        self._sessions = 0
        super().__init__(*parts, share=team.share)
        self._description = f"{description} on {team.group.size()} ranks"

    def open_session(self, check: CheckCancelled = lambda: None, *, shared: bool = False) -> TeamSession:
        """See MlxModel."""
        self._sessions += 1
        self._team.announce("open_session")
        return TeamSession(*self._session_parts(self._team.watch(check)), self._team, self._sessions)

    def attach(self, spec: SelfDraftSpec, **arguments: Any) -> Any:
        """Raises Unsupported."""
        raise Unsupported("a model on several ranks cannot draft for itself.", hint=_OTHER_DRAFT)

    def attach_head(
        self,
        spec: HeadSpec,
        path: Path,
        *,
        progress: Callable[[float], None] = lambda fraction: None,
        check: CheckCancelled = lambda: None,
    ) -> MlxHead:
        """See MlxModel. Rank 0 alone has the head; it reads hidden states, which all ranks have."""
        if spec.kind == "gemma4-assistant":
            raise Unsupported("this head reads the target's cache, which several ranks share.", hint=_OTHER_DRAFT)
        if find_split_output(self.network):
            raise Unsupported(
                "this head uses the target's output matrix, which several ranks share.", hint=_OTHER_DRAFT
            )
        return super().attach_head(spec, path, progress=progress, check=check)

    def close(self) -> None:
        if self._model is not None:
            with suppress(BackendError):  # they are gone
                self._team.announce("close_model")
        super().close()


class TeamSession(MlxSession):
    """A session of which each rank has its part of the cache. Drafts come to the host before a forward."""

    def __init__(self, *parts: Any) -> None:
        """The arguments of MlxSession, then the team and the session's number in the model."""
        *own, self._team, self.number = parts
        super().__init__(*own)

    def tap(self, layers: tuple[int, ...]) -> Features[Any]:
        with self._mirror("tap", layers=layers):
            return super().tap(layers)

    def untap(self) -> None:
        with self._mirror("untap"):
            super().untap()

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        check_prompt(tokens, self.capabilities)
        with self._mirror("prefill", tokens=list(map(int, tokens))):
            try:
                return (yield from super().prefill(tokens))
            except GeneratorExit:  # the other ranks wait for the next check
                self._team.announce("stop")
                return None  # type: ignore[return-value] # of a generator that is closed

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        check_forward(self, root, draft)
        draft = Draft(draft.tokens, draft.parents)
        with self._mirror("forward", root=int(root), tokens=draft.tokens.tolist(), parents=draft.parents.tolist()):
            return super().forward(root, draft)

    def commit(self, path: Sequence[int]) -> None:
        with self._mirror("commit", path=list(map(int, path))):
            super().commit(path)

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        with self._mirror("rollout", tokens=list(map(int, tokens)), n=n, vocab_size=vocab_size):
            return super().rollout(tokens, n, vocab_size)

    def checkpoint(self) -> None:
        with self._mirror("checkpoint"):
            super().checkpoint()

    def rewind(self, position: int) -> int:
        with self._mirror("rewind", position=position):
            return super().rewind(position)

    def extend(self, n: int) -> int:
        with self._mirror("extend", n=n):
            return super().extend(n)

    def close(self) -> None:
        if not self._is_closed:
            with suppress(BackendError):
                self._team.announce("close", session=self.number)
        super().close()

    def repeat(self, do: str, arguments: Mapping[str, Any]) -> None:
        """Run the operation `do` of rank 0's session. Raises what that raises too, and BackendError."""
        if do == "prefill":
            read_prompt(self, arguments["tokens"])
        elif do == "forward":
            tokens, parents = (np.asarray(arguments[name], np.int32) for name in ("tokens", "parents"))
            self.forward(arguments["root"], Draft(tokens, parents))
        elif do in _REPEATED:
            getattr(self, do)(**arguments)
        else:
            raise BackendError(f"rank 0 asks for an unknown operation {do!a}.", hint="Report this as a bug.")

    def _choose_best(self, logits: Any) -> Any:
        token = self._team.share(super()._choose_best(logits))
        mx.async_eval(token)  # on all ranks, of which only this one may read it
        return token

    def _mirror(self, do: str, **arguments: Any) -> Any:
        self._sync()
        return mirrored(self._team, do, session=self.number, **arguments)


def load_part(
    path: Path, options: LoadOptions, team: Team, *, progress: Callable[[float], None], check: CheckCancelled
) -> tuple[ModelParts, str]:
    """Read this rank's part of the weights, and no more; with the description of the whole model.

    Raises InvalidRequest for a model that cannot be split, InvalidModelFile, BackendError, Cancelled.
    """
    parts = open_parts(path, options)
    description = describe(parts.model)
    split(parts.model, team.group)
    read_weights(parts.model, progress, check)
    return parts, description
