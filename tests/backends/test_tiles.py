"""llama.cpp's AMX kernels, which some compilers break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.backends.llamacpp import tiles
from tests.gguf_models import TARGET


def test_a_quantized_model_reads_tokens_whatever_the_processor_has(tmp_path: Path) -> None:
    env = {**os.environ, "EDGESPEC_CACHE_DIR": str(tmp_path)}
    env.pop(tiles.SWITCH, None)
    command = [sys.executable, "-m", "edgespec", "run", "def f", "--model", str(TARGET), "--max-tokens", "2"]
    done = subprocess.run([*command, "--threads", "1", "--draft", "none"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    notes = [*(tmp_path / "calibration").glob("amx-*")]
    assert len(notes) == ("amx_int8" in Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else 0)


@pytest.mark.parametrize(("switch", "answer"), [("0", "broken"), ("1", "sound")])
def test_processes_take_the_answer_of_the_one_that_started_them(switch: str, answer: str, tmp_path: Path) -> None:
    has_amx = "import edgespec.backends.llamacpp.tiles as tiles; tiles._has_amx = lambda: True\n"
    code = has_amx + "print('sound' if tiles.amx_is_sound() else 'broken')"
    env = {**os.environ, tiles.SWITCH: switch, "EDGESPEC_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == answer and not [*tmp_path.iterdir()]
