"""What the benchmarks share: the embedded pair, model loading, one generation, the JSON line at the end."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgespec.backends import BackendName, Model, open_model
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.backends.options import LoadOptions
from edgespec.controller.store import describe_machine
from edgespec.drafters import drafter_specs
from edgespec.engine.drafting import LoadedDrafter, Speculation, list_drafters
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = REPOSITORY / "edgespec" / "assets" / "python-6m" / "target.gguf"
DRAFT = TARGET.with_name("draft.gguf")
EDGESPEC = (sys.executable, "-c", "from edgespec.cli.main import main; main()")  # the command, as a process
PLAIN = Speculation()
MODEL_PATH = click.Path(exists=True, path_type=Path)


def load_model(backend: BackendName, path: Path, options: LoadOptions) -> Model:
    """Load without a progress display. Raises InvalidModelFile, BackendUnavailable, BackendError."""
    return open_model(backend, path, options, progress=lambda fraction: None, check=lambda: None)


def load_pair(backend: BackendName, target: Path, draft: Path, options: LoadOptions) -> Engine:
    """Both models in an engine; it decodes plainly until its `speculation` changes."""
    return Engine(load_model(backend, target, options), list_loaded(model=load_model(backend, draft, options)), PLAIN)


def list_loaded(**sources: Model | AttachedDraft) -> list[LoadedDrafter]:
    """Lookups, and a drafter for each of `sources`, by its name in the registry."""
    specs = drafter_specs()
    return [*list_drafters(["ngram"]), *(LoadedDrafter(specs[name], name, each) for name, each in sources.items())]


def generate(engine: Engine, speculation: Speculation, request: Request) -> Finished:
    """Run one request to its end."""
    engine.speculation = speculation
    *_, finished = engine.stream(request)
    assert isinstance(finished, Finished)
    return finished


def print_result(benchmark: str, result: Mapping[str, Any], *models: Path) -> None:
    """Print the JSON line: the result, the machine, package versions, and a hash of each model's weights."""
    click.echo(json.dumps({"benchmark": benchmark, **result, **describe(*models)}))


def describe(*models: Path) -> dict[str, Any]:
    """Processor, system, versions, and the first 16 hex digits of the SHA-256 of each model's weights."""
    hashes = {str(file.relative_to(file.parent.parent)): _sha256(file) for file in map(_weights_file, models)}
    return {**describe_machine(), "files": hashes}


def _weights_file(model: Path) -> Path:
    """The model itself, or the first shard in its folder."""
    return min(model.glob("model*.safetensors")) if model.is_dir() else model


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
