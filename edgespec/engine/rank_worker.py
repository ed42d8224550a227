"""Runs what rank 0 of mlx.launch says, as another rank."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

from edgespec.backends import require
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.engine.team import list_versions
from edgespec.errors import BackendError, Cancelled, EdgespecError, InvalidRequest, reason_of
from edgespec.machines.ranks import Ranks
from edgespec.machines.wire import MEET_S, Follower, is_reachable
from edgespec.models.cache import RemoteModel
from edgespec.models.hub import Hub
from edgespec.models.references import parse_reference
from edgespec.models.resolve import Source, fetch_source, resolve_source

if TYPE_CHECKING:
    from edgespec.backends.mlx.team import FollowingTeam
    from edgespec.backends.mlx.team_model import TeamModel, TeamSession


def read_source(message: dict[str, str], hub: Hub) -> Source:
    """The model that rank 0 loads, as this machine finds it.

    Raises UnknownModel, HubError, InvalidModelFile, InvalidRequest for another commit.
    """
    source = resolve_source(parse_reference(message["reference"]), "mlx", hub)
    if isinstance(source, RemoteModel) and source.commit != message["commit"]:
        raise InvalidRequest(
            f"{source.repo} is at another commit than on rank 0.", hint="Run `edgespec pull` on all machines."
        )
    return source


_AGAIN = "EDGESPEC_RANK_AGAIN"
_WAIT_AGAIN_S = 2.0
_AGREE_S = 10.0


def mlx_worker(ranks: Ranks) -> int:
    """Run what rank 0 says; returns the exit code once rank 0's command has ended.

    A process can join the ranks of MLX once. So if the process that leads has ended, this program starts anew, and
    waits for the next one. Raises BackendError if rank 0 cannot be found.
    """
    from edgespec.backends import leave_thread

    require("mlx")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's
    is_again = os.environ.pop(_AGAIN, None) is not None
    try:
        link = Follower(ranks, list_versions(), _WAIT_AGAIN_S if is_again else MEET_S, lambda: _restart(ranks))
    except BackendError:
        if is_again:
            return 0
        raise
    try:
        _Rank(ranks, link).run()
    except Exception as error:  # noqa: BLE001 - rank 0 says it
        traceback.print_exception(error)  # into the log of this machine
        link.reply(error=reason_of(error), is_fatal=True)
        sleep(_AGREE_S)  # rank 0's process ends, or has ended, which may be the reason: see _restart
        leave_thread()
        return BackendError.exit_code


def _restart(ranks: Ranks) -> None:
    """Start this program anew in this process, whatever its main thread waits for; end it if rank 0's command ended."""
    if not is_reachable(ranks):
        os._exit(0)
    ranks.export()
    os.environ[_AGAIN] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _Rank:
    """Runs rank 0's operations."""

    def __init__(self, ranks: Ranks, link: Follower) -> None:
        self._ranks = ranks
        self._link = link
        self._team: FollowingTeam | None = None
        self._model: TeamModel | None = None
        self._sessions: dict[int, TeamSession] = {}
        self._methods: dict[str, Callable[..., None]] = {
            "join": self._join,
            "load": self._load,
            "open_session": self._open_session,
            "close_model": self._close_model,
            "stop": lambda: None,  # of an operation that was over already
        }

    def run(self) -> NoReturn:
        """Run rank 0's operations until the process ends. Raises the error of one that failed on this rank alone."""
        from edgespec.backends.mlx.team import REFUSALS

        while True:
            message = self._link.receive()
            do = message.pop("do")
            try:
                if number := message.pop("session", 0):
                    self._sessions[number].repeat(do, message)
                    if do == "close":
                        del self._sessions[number]
                else:
                    self._methods[do](**message)
            except REFUSALS:  # rank 0 has raised it too
                pass

    def _join(self) -> None:
        from edgespec.backends.mlx.team import FollowingTeam

        self._team = FollowingTeam(self._link, self._ranks)

    def _load(self, source: dict[str, str], options: dict[str, Any]) -> None:
        from edgespec.backends.mlx.team_model import TeamModel, load_part

        assert self._team is not None
        is_stopped, parts = False, None

        def check() -> None:
            nonlocal is_stopped
            if self._link.peek() is not None:  # rank 0 sends nothing else before the answer
                is_stopped = True
                raise Cancelled

        try:
            with cancellable(check):
                hub = Hub.from_environment()
                path = fetch_source(read_source(source, hub), hub)
                parts = load_part(path, LoadOptions(**options), self._team)
        except (EdgespecError, Cancelled) as error:
            hint = {"hint": error.hint} if isinstance(error, EdgespecError) else {}
            self._link.reply(error=reason_of(error), **hint)
        else:
            self._link.reply()
        if is_stopped or self._link.receive()["do"] == "stop" or parts is None:
            return
        try:
            self._model = TeamModel(*parts, self._team)
        except EdgespecError:
            if self._link.peek(_AGREE_S) is None:  # rank 0 has not raised it too, and waits for this one
                raise

    def _open_session(self) -> None:
        assert self._model is not None
        session = self._model.open_session()
        self._sessions[session.number] = session

    def _close_model(self) -> None:
        model, self._model = self._model, None
        self._sessions = {}
        if model is not None:
            model.close()
