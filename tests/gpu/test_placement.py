"""Layers, drafts, experts and caches on a device and on the host: the same text, and a sentence where memory ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.engine.engine import Engine
from edgespec.machines.memory import DeviceMemory
from tests.backends.dflash_heads import DIALECTS, make_dflash
from tests.backends.head_sessions import TEXT, Pair
from tests.gguf_models import TARGET, mixture

pytestmark = pytest.mark.usefixtures("folders")

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
PLACES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "no layer": {"gpu_layers": 0},
    "some layers": {"gpu_layers": 3},
    "more layers than there are": {"gpu_layers": 99},
    "the draft on the host": {"gpu_layers_draft": 0},
    "the target on the host": {"gpu_layers": 0, "gpu_layers_draft": 99},
    "a quantized cache": {"kv_type": "q8_0"},
    "without flash attention": {"flash_attention": False},
}
TIE = 0.3  # of two logits; the kernels of a device differ with the number of rows


def require_same(path: Path, prompt: str, plain: Sequence[int], other: Sequence[int]) -> None:
    """`other` are the tokens of `plain`, at least up to a position where both are about as probable."""
    if tuple(plain) == tuple(other):
        return
    model = open_model("llamacpp", path, LoadOptions(threads=1, gpu_layers=0))
    engine = Engine(model, (), Speculation())
    session = model.open_session()
    fork = first_divergence(session, engine.encode(prompt), plain, other)
    session.close()
    engine.close()
    assert fork is not None and fork.gap <= TIE, fork


def write(model: str, **arguments: Any) -> edgespec.Reply:
    with edgespec.load(model, backend="llamacpp", threads=1, ctx=512, **arguments) as opened:
        return opened.generate(PROMPT, max_tokens=48, temperature=0)


@pytest.mark.parametrize("place", PLACES)
def test_a_place_does_not_change_the_text(place: str) -> None:
    plain = write("python-6m", draft="none", **PLACES[place])
    drafted = write("python-6m", draft="ngram+model", draft_max=3, **PLACES[place])
    assert drafted.stats.accepted_tokens > 0
    require_same(TARGET, PROMPT, plain.tokens, drafted.tokens)
    require_same(TARGET, PROMPT, write("python-6m", draft="none", gpu_layers=0).tokens, plain.tokens)


@pytest.mark.parametrize("draft", ["layerskip:4", "qspec:4", "sparse:4,32", "recycling", "auto"])
def test_drafts_of_the_target_itself_do_not_change_the_text(draft: str) -> None:
    found = write("python-6m", draft=draft, **({} if draft == "auto" else {"draft_max": 3}))
    require_same(TARGET, PROMPT, write("python-6m", draft="none").tokens, found.tokens)


def test_a_head_on_the_host_reads_tensors_of_a_target_on_the_device(tmp_path: Path) -> None:
    dialect, rows = DIALECTS["dflash"], []
    path = make_dflash(tmp_path / "head.gguf", dialect)
    for layers, of_head in ((0, 0), (0, 9), (None, 0), (3, 0)):
        options = LoadOptions(context_size=256, threads=1, gpu_layers=layers, gpu_layers_draft=of_head)
        target = load(TARGET, options)
        head = open_head(target, path, dialect.spec)
        pair = Pair(target, head, TEXT[:60])
        rows.append(pair.block())
        for each in (pair, head, target):
            each.close()
    assert max(float(np.abs(each - rows[0]).max()) for each in rows) < TIE


@pytest.mark.parametrize("in_ram", [1, 2])
def test_experts_may_stay_in_ram(tmp_path: Path, in_ram: int) -> None:
    path = tmp_path / "mixture.gguf"
    mixture(path)
    on_device, shared = (write(str(path), draft="none", n_cpu_moe=n).tokens for n in (0, in_ram))
    require_same(path, PROMPT, on_device, shared)


LAST = "Vulkan1"  # of the two that Vulkan makes of one device


def read_buffers(*options: str) -> tuple[str, dict[str, float]]:
    """(the text, MiB of weights by device) of `edgespec run` on all devices, of which Vulkan finds one twice."""
    words = [*(sys.executable, "-m", "edgespec", "run", PROMPT, "--model", "python-6m", "--draft", "none", "--verbose")]
    words += ["--max-tokens", "8", "--temperature", "0", "--ctx", "256", "--threads", "1", "--no-memory"]
    done = subprocess.run(
        [*words, *options],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"GGML_VK_VISIBLE_DEVICES": "0,0"},
    )
    found = re.findall(r"load_tensors: +(\w+) model buffer size = +([\d.]+) MiB", done.stderr)
    return done.stdout, {name: float(size) for name, size in found}


def test_named_devices_alone_are_used(devices: tuple[DeviceMemory, ...]) -> None:
    """Another runtime than Vulkan runs this with all that it finds and with the last."""
    last = LAST if devices[0].name == "Vulkan0" else devices[-1].name
    text, used = read_buffers()
    other, alone = read_buffers("--device", last)
    assert text == other and last in used and alone.keys() - {"CPU", "CPU_Mapped"} == {last}


def test_layers_are_divided_as_the_user_says(devices: tuple[DeviceMemory, ...]) -> None:
    first = devices[0].name
    text, by_memory = read_buffers()
    other, all_on_first = read_buffers("--tensor-split", "1")
    assert text == other and all_on_first.keys() - {"CPU", "CPU_Mapped"} == {first}
    assert all_on_first[first] >= by_memory[first]


def test_tensors_lie_where_the_user_says(devices: tuple[DeviceMemory, ...]) -> None:
    first = devices[0].name
    text, before = read_buffers("--device", first)
    other, after = read_buffers("--device", first, "--override-tensor", r"blk\.[0-3]\.ffn_.*=CPU")
    assert after[first] < before[first]
    moved, there = read_buffers("--gpu-layers", "0", "--override-tensor", rf"blk\.0\.ffn_up={first}")
    assert 0 < there[first] < after[first] and text == other == moved


def test_the_device_is_named(devices: tuple[DeviceMemory, ...]) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "edgespec", "doctor", "--json"], capture_output=True, text=True, check=True
    )
    assert devices[0].name in json.dumps(json.loads(made.stdout))
