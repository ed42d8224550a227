"""Damaged files of every kind end in an answer or a sentence; `make nightly` opens many more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gguf_models import REPOSITORY

QUICK = (
    *("gguf-header", "gguf-tensors", "gguf-metadata", "gguf-weights", "gguf-draft", "gguf-file"),
    *("vocabulary", "template", "registry", "stores", "hub"),
)
SLOW = ("mlx-config", "mlx-weights", "mlx-tokenizer", "mlx-tokenizer-config", "head")


@pytest.mark.skipif(find_spec("mlx") is None, reason="a first patch is tested without runtimes")
@pytest.mark.parametrize(("kinds", "opens"), [(QUICK, 5), (SLOW, 2)], ids=["quick", "slow"])
def test_no_damaged_file_ends_the_process(kinds: tuple[str, ...], opens: int, tmp_path: Path) -> None:
    chosen = [argument for kind in kinds for argument in ("--kind", kind)]
    command = [sys.executable, "-m", "laboratory.fuzz", "--opens", str(opens), "--keep", str(tmp_path), *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["opens"] == opens * len(kinds) and found["faults"] == 0 and len(found["kinds"]) == len(kinds)
    ends = {end for counts in found["kinds"].values() for end in counts}
    assert ends == {"answered", "told"}, "cases that all end alike would test nothing"
