"""Rank 0: have the other ranks load their parts of a model, and load this rank's."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.backends import Model, require
from edgespec.backends.options import LoadOptions
from edgespec.backends.rank_link import Leader
from edgespec.backends.ranks import count_ranks, get_door
from edgespec.core.protocols import CheckCancelled
from edgespec.errors import BackendError, InvalidRequest
from edgespec.hub.hub import Hub
from edgespec.hub.reference import HubRepo, LocalPath, parse_reference
from edgespec.planner.plan import Plan, Reporter
from edgespec.registry.resolve import HubMlx, LocalMlx, PackagedGguf, Source, resolve_source
from edgespec.registry.shipped import name_packaged

if TYPE_CHECKING:
    from edgespec.backends.mlx.team import LeadingTeam

_OPTIONS = ("context_size", "kv_type")  # those that MLX reads


def check_ranks(planned: Plan) -> None:
    """Raises InvalidRequest for a model that cannot run under mlx.launch."""
    if count_ranks() > 1 and planned.backend != "mlx":
        raise InvalidRequest(
            f"under mlx.launch a model runs on MLX, and {planned.name} opens with llama.cpp.",
            hint="Add --backend mlx, or start edgespec without mlx.launch; llama.cpp splits models by --workers.",
        )


def load_leading(
    source: Source, path: Path, options: LoadOptions, reporter: Reporter, check: CheckCancelled = lambda: None
) -> Model:
    """Load the model of `source`, whose files are at `path` here, over all ranks.

    Raises InvalidRequest, InvalidModelFile, BackendError, Cancelled.
    """
    require("mlx")
    from edgespec.backends.mlx.team_model import TeamModel, load_part

    team = lead_ranks(check)
    leader = team.leader
    reporter.notice(f"The model is split over {leader.ranks.size} ranks.")
    leader.ask("load", source=write_source(source), options={name: getattr(options, name) for name in _OPTIONS})
    try:
        progress = partial(reporter.loading, path.name)
        parts, description = load_part(path, options, team, progress=progress, check=check)
        leader.gather(check)
        leader.tell("go")
        return TeamModel(parts, description, team)
    except BaseException:
        leader.tell("stop")
        with suppress(BackendError):
            leader.gather(lambda: None)
        raise


def list_versions() -> dict[str, str]:
    """Of the packages that are the same on all ranks."""
    return {name: version(name) for name in ("edgespec", "mlx", "mlx-lm")}


_team: LeadingTeam | None = None


def lead_ranks(check: CheckCancelled) -> LeadingTeam:
    """The team of this process, which is made once. Raises BackendError, Cancelled."""
    global _team
    if _team is None:
        from edgespec.backends.mlx.team import LeadingTeam

        door = get_door()
        assert door is not None
        _team = LeadingTeam(Leader(door, list_versions(), check))
    return _team


def write_source(source: Source) -> dict[str, str]:
    """For read_source on another machine. Raises ValueError for one that MLX cannot open."""
    match source:
        case HubMlx(model):
            return {"reference": str(HubRepo(model.repo, model.revision)), "commit": model.commit}
        case PackagedGguf(path):
            return {"reference": str(name_packaged(path))}
        case LocalMlx(path):
            return {"reference": str(LocalPath(path.resolve()))}
        case _:
            raise ValueError(f"MLX does not open {source}")


def read_source(message: dict[str, str], hub: Hub) -> Source:
    """What rank 0 has loaded. Raises UnknownModel, HubError, InvalidModelFile, InvalidRequest for another commit."""
    source = resolve_source(parse_reference(message["reference"]), "mlx", hub)
    if isinstance(source, HubMlx) and source.model.commit != message["commit"]:
        raise InvalidRequest(
            f"{source.model.repo} is at another commit than on rank 0.", hint="Run `edgespec pull` on all machines."
        )
    return source
