"""What the benchmarks share: models and prompts, one generation, other processes, the JSON line at the end."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.store import describe_machine
from edgespec.backends import BackendName, Model, open_model
from edgespec.backends.attached_draft import AttachedDraft, AttachedHead
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.core.protocols import Session, Step
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.models.drafts import DrafterPlan

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = REPOSITORY / "edgespec" / "assets" / "python-6m" / "target.gguf"
DRAFT = TARGET.with_name("draft.gguf")
EDGESPEC = (sys.executable, "-c", "from edgespec.cli.main import main; main()")  # the command, as a process
PLAIN = Speculation()
MODEL_PATH = click.Path(exists=True, path_type=Path)


def load_model(backend: BackendName, path: Path, options: LoadOptions) -> Model:
    """Load without a progress display. Raises InvalidModelFile, BackendUnavailable, BackendError."""
    return open_model(backend, path, options)


def load_pair(backend: BackendName, target: Path, draft: Path, options: LoadOptions) -> Engine:
    """Both models in an engine; it decodes plainly until its `speculation` changes."""
    return Engine(load_model(backend, target, options), list_loaded(model=load_model(backend, draft, options)), PLAIN)


def list_drafters(names: Sequence[str]) -> list[LoadedDrafter]:
    """The drafters of `names` that need nothing to be loaded."""
    specs = drafter_specs()
    return [LoadedDrafter(DrafterPlan(specs[name])) for name in names if specs[name].needs in ("nothing", "memory")]


def list_loaded(**sources: Model | AttachedDraft | AttachedHead) -> list[LoadedDrafter]:
    """Lookups, and a drafter for each of `sources`, by its name in the registry."""
    specs = drafter_specs()
    return [
        *list_drafters(["ngram"]),
        *(LoadedDrafter(DrafterPlan(specs[name]), each) for name, each in sources.items()),
    ]


def generate(engine: Engine, speculation: Speculation, request: Request) -> Finished:
    """Run one request to its end."""
    engine.speculation = speculation
    *_, finished = engine.stream(request)
    assert isinstance(finished, Finished)
    return finished


def generate_rounds(engine: Engine, speculation: Speculation, request: Request) -> tuple[Finished, list[Step]]:
    """Run one request to its end; returns its rounds too, without the first token."""
    engine.speculation = speculation
    *events, finished = engine.stream(request)
    assert isinstance(finished, Finished)
    return finished, [event for event in events if isinstance(event, Step) and event.index]


def count_near_ties(session: Session, pairs: Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> int:
    """How many of (prompt, greedy text, another one) rounding explains."""
    forks = [first_divergence(session, *pair) for pair in pairs]
    return sum(fork is None or fork.is_near_tie for fork in forks)


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process that answers lines with JSON says to the next one."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise click.ClickException("the process of the model has ended.")
    result: dict[str, Any] = json.loads(line)
    return result


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process."""
    process.kill()
    process.wait()


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


# Beginnings of Python code, which the trained pair can continue.
CODE = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n    ",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n    x: int\n",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(description=__doc__)\n",
    'class Node:\n    """A node of a linked list."""\n\n    def __init__(self, value, next=None):\n',
    "try:\n    import json\nexcept ImportError:\n",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n",
    "def main():\n    logging.basicConfig(level=logging.INFO)\n    logger = logging.getLogger(__name__)\n",
    "for line in file:\n    line = line.strip()\n    if not line or line.startswith('#'):\n",
    "def flatten(items):\n    result = []\n    for item in items:\n        if isinstance(item, list):\n",
    "class Config(dict):\n    def __getattr__(self, name):\n        try:\n            return self[name]\n",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n",
    "with open(path, 'w', encoding='utf-8') as file:\n    json.dump(",
    "def retry(function, attempts=3, delay=1.0):\n    for attempt in range(attempts):\n        try:\n",
    "import threading\n\n\nclass Worker(threading.Thread):\n    def run(self):\n        while not self.stopped:\n",
    "def matrix_multiply(a, b):\n    rows, columns = len(a), len(b[0])\n    result = []\n",
    "if __name__ == '__main__':\n    sys.exit(",
    'def to_roman(number):\n    """Convert an integer to a Roman numeral."""\n    numerals = [\n',
)
