"""A model of which each rank has a part. Rank 0 decides; the others run the same operations on their own sessions."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from edgespec.backends.attached_draft import SelfDraftSpec, Unsupported
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel, ModelParts, describe, open_parts, read_weights
from edgespec.backends.mlx.session import MlxSession
from edgespec.backends.mlx.team import REFUSALS, Team, split
from edgespec.backends.options import LoadOptions
from edgespec.backends.sequence import check_forward, check_prompt
from edgespec.core.decoding import read_prompt
from edgespec.core.peers import Yield
from edgespec.core.protocols import Draft, PrefillProgress
from edgespec.core.scores import Scores
from edgespec.errors import BackendError
from edgespec.formats.heads import HeadSpec

_REPEATED = ("tap", "untap", "commit", "rollout", "checkpoint", "rewind", "extend")
_OTHER_DRAFT = "Use --draft ngram, or a draft model."


class TeamModel(MlxModel):
    """One rank's part of a model. Every rank makes it with the same arguments."""

    def __init__(self, parts: ModelParts, description: str, team: Team) -> None:
        """Probes the model together with the other ranks. Raises BackendError."""
        self._team = team
        self._sessions = 0
        super().__init__(*parts, share=team.share)
        self.description = f"{description} on {team.group.size()} ranks"

    def open_session(self, *, shared: bool = False) -> TeamSession:
        self._sessions += 1
        self._team.announce("open_session")
        return TeamSession(*self._session_parts(), self._team, self._sessions)

    def make_self_draft(self, spec: SelfDraftSpec, **arguments: Any) -> Any:
        """Raises Unsupported."""
        raise Unsupported("a model on several ranks cannot draft for itself.", hint=_OTHER_DRAFT)

    def load_head(self, spec: HeadSpec, path: Path, **arguments: Any) -> MlxHead:
        """Loads a head on rank 0 alone. It reads hidden states, which all ranks have."""
        kinds = (AllToShardedLinear, QuantizedAllToShardedLinear)
        parts = [each for name, each in self.network.named_modules() if name.rsplit(".", 1)[-1] == "lm_head"]
        if spec.kind == "gemma4-assistant" or isinstance(next(iter(parts), None), kinds):
            raise Unsupported(
                "this head uses the target's cache or output matrix, which several ranks share.", hint=_OTHER_DRAFT
            )
        return super().load_head(spec, path, **arguments)

    def close(self) -> None:
        if self._model is not None:
            with suppress(BackendError):  # they are gone
                self._team.announce("close_model")
        super().close()


def _repeated(name: str) -> Any:
    """The method of MlxSession of this name, on all ranks."""
    plain = getattr(MlxSession, name)

    def call(session: TeamSession, *arguments: Any) -> Any:
        sent = [int(each) if isinstance(each, int | np.integer) else list(map(int, each)) for each in arguments]
        with session.mirror(name, arguments=sent):
            return plain(session, *arguments)

    return call


class TeamSession(MlxSession):
    """A session of which each rank has its part of the cache. Drafts come to the host before a forward."""

    def __init__(self, *parts: Any) -> None:
        """The arguments of MlxSession, then the team and the session's number in the model."""
        *own, self._team, self.number = parts
        super().__init__(*own)

    tap, untap, commit, rollout, checkpoint, rewind, extend = map(_repeated, _REPEATED)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        check_prompt(tokens, self.capabilities)
        with self.mirror("prefill", tokens=list(map(int, tokens))):
            try:
                return (yield from super().prefill(tokens))
            except GeneratorExit:  # the other ranks wait for the next check
                self._team.announce("stop")
                return None  # type: ignore[return-value] # of a generator that is closed

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        check_forward(self, root, draft)
        draft = Draft(draft.tokens, draft.parents)
        with self.mirror("forward", root=int(root), tokens=draft.tokens.tolist(), parents=draft.parents.tolist()):
            return super().forward(root, draft)

    def _poll(self) -> None:
        self._team.poll()

    def save_state(self, limit: int) -> None:
        """Each rank has a part of the cache, and keeps none."""

    def restore_state(self, tokens: Sequence[int], state: memoryview) -> bool:
        self.rewind(0)
        return False

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
        elif do == "close":
            self.close()
        elif do in _REPEATED:
            getattr(self, do)(*arguments["arguments"])
        else:
            raise BackendError(f"rank 0 asks for an unknown operation {do!a}.", hint="Report this as a bug.")

    @contextmanager
    def mirror(self, do: str, **arguments: Any) -> Iterator[None]:
        """Inside, all ranks run the operation `do` on their sessions of this number. Raises BackendError."""
        self._sync()
        self._team.announce(do, session=self.number, **arguments)
        try:
            yield
        except REFUSALS:
            raise
        except BaseException:
            self._team.leave()
            raise

    def _choose_best(self, logits: Any) -> Any:
        token = self._team.share(super()._choose_best(logits))
        mx.async_eval(token)  # on all ranks, of which only this one may read it
        return token


def load_part(path: Path, options: LoadOptions, team: Team) -> tuple[ModelParts, str]:
    """Read this rank's part of the weights, and no more; with the description of the whole model.

    Raises InvalidRequest for a model that cannot be split, InvalidModelFile, BackendError, Cancelled.
    """
    parts = open_parts(path, options)
    description = describe(parts.model)
    split(parts.model, team.group)
    read_weights(parts.model)
    return parts, description
