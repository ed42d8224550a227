"""What rank 0 tells the other ranks of a model's files, which lie elsewhere on their machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.engine.rank_worker import read_source
from edgespec.engine.team import write_source
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.models.hub import Hub
from edgespec.models.references import parse_reference
from edgespec.models.resolve import LocalModel, resolve_source
from tests.mlx_models import DENSE, make_folder
from tests.models.hubserver import HubServer


def test_every_rank_finds_the_same_files(hub: Hub, server: HubServer, root: Path, tmp_path: Path) -> None:
    make_folder(root / "mlx-community" / "M-4bit", DENSE)
    remote = resolve_source(parse_reference("mlx-community/M-4bit"), "mlx", hub)
    local = LocalModel(make_folder(tmp_path / "dense", DENSE), "mlx")
    for source in (remote, local, resolve_source(parse_reference("package:python-6m/target.gguf"), "mlx", hub)):
        assert read_source(json.loads(json.dumps(write_source(source))), hub) == source
    with pytest.raises(InvalidRequest, match="another commit than on rank 0"):
        read_source({**write_source(remote), "commit": "0" * 40}, hub)
    with pytest.raises(EdgespecError):
        read_source({"reference": str(tmp_path / "missing")}, hub)
