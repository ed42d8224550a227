"""A model on several ranks of mlx.launch: rank 0 tells the others what to load and what to run."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.backends import Model, require
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.errors import BackendError, InvalidRequest
from edgespec.machines.ranks import count_ranks, get_rank_address
from edgespec.machines.wire import Leader
from edgespec.models.cache import RemoteModel
from edgespec.models.packaged import name_packaged
from edgespec.models.plan import Plan
from edgespec.models.references import HubRepo, LocalPath
from edgespec.models.resolve import LocalModel, Source
from edgespec.progress import loading, notice

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


def load_leading(source: Source, path: Path, options: LoadOptions) -> Model:
    """Load the model of `source`, whose files are at `path` here, over all ranks.

    Raises InvalidRequest, InvalidModelFile, BackendError, Cancelled.
    """
    require("mlx")
    from edgespec.backends.mlx.team_model import TeamModel, load_part

    team = mlx_leader()
    leader = team.leader
    notice(f"The model is split over {leader.ranks.size} ranks.")
    leader.ask("load", source=write_source(source), options={name: getattr(options, name) for name in _OPTIONS})
    try:
        with loading(path.name):
            parts, description = load_part(path, options, team)
        leader.gather()
        leader.tell("go")
        return TeamModel(parts, description, team)
    except BaseException:
        leader.tell("stop")
        with suppress(BackendError), cancellable(lambda: None):  # they are told already
            leader.gather()
        raise


def list_versions() -> dict[str, str]:
    """Versions of the packages that are the same on all ranks."""
    return {name: version(name) for name in ("edgespec", "mlx", "mlx-lm")}


_team: LeadingTeam | None = None


def mlx_leader() -> LeadingTeam:
    """The team of this process, which is made once. Raises BackendError, Cancelled."""
    global _team
    if _team is None:
        from edgespec.backends.mlx.team import LeadingTeam

        address = get_rank_address()
        assert address is not None
        _team = LeadingTeam(Leader(address, list_versions()))
    return _team


def write_source(source: Source) -> dict[str, str]:
    """Describe a source for read_source on another machine. A GGUF file is that of a package: MLX opens no other."""
    match source:
        case RemoteModel():
            return {"reference": str(HubRepo(source.repo, source.revision)), "commit": source.commit}
        case LocalModel(path, "gguf"):
            return {"reference": str(name_packaged(path))}
        case LocalModel(path):
            return {"reference": str(LocalPath(path.resolve()))}
