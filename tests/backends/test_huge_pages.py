"""Huge pages: the kernel's modes, and which memory of a process asks for them. Read from /proc, on Linux."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.quantize import quantize
from edgespec.backends.llamacpp.tiles import amx_is_sound
from edgespec.machines.huge_pages import read_mode
from tests.gguf_models import REPOSITORY, TARGET, llama

needs_madvise = pytest.mark.skipif(
    sys.platform != "linux" or read_mode() != "madvise", reason="the kernel does not wait to be asked for huge pages"
)
MEASURES = """
import re, pathlib
def advised_bytes():
    '''Of all mappings that have asked for huge pages, in `smaps`.'''
    text = pathlib.Path("/proc/self/smaps").read_text()
    parts = re.findall(r"^Size: +([0-9]+) kB$(?:(?!^Size).)*?^VmFlags:(.*?)$", text, re.MULTILINE | re.DOTALL)
    return sum(int(size) * 1024 for size, flags in parts if "hg" in flags.split())
def huge_bytes():
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return int(re.search("AnonHugePages: +([0-9]+)", text)[1]) * 1024
"""


def run(program: str, *arguments: str, **environment: str) -> list[int]:
    """What a program prints as JSON, in a process without a setting of its own for huge pages."""
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", MEASURES + program, *arguments]
    done = subprocess.run(command, env={**kept, **environment}, cwd=REPOSITORY, capture_output=True, check=True)
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_modes(mode: str, tmp_path: Path) -> None:
    assert read_mode(tmp_path) is None
    (tmp_path / "enabled").write_text(re.sub(mode, f"[{mode}]", "always madvise never\n"))
    assert read_mode(tmp_path) == mode


MAP_AND_ADVISE = """
import json, mmap
from edgespec.machines.huge_pages import NewMemory
new = lambda size: mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory = NewMemory()
small, large = new(8 << 20), new(64 << 20)
memory.advise()
print(json.dumps([advised_bytes()]))
"""


@needs_madvise
def test_only_new_and_large_memory_asks_for_huge_pages() -> None:
    (advised,) = run(MAP_AND_ADVISE)
    assert 60 << 20 <= advised <= 80 << 20  # small ones count where the kernel has joined them with the large one


@needs_madvise
@pytest.mark.parametrize("tunables", ["glibc.malloc.hugetlb=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=0"])
def test_the_users_own_setting_is_kept(tunables: str) -> None:
    assert run(MAP_AND_ADVISE, GLIBC_TUNABLES=tunables) == [0]
    assert run(MAP_AND_ADVISE, GLIBC_TUNABLES="glibc.malloc.check=0") != [0]


LOAD = """
import json, sys
from pathlib import Path
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
model = load(Path(sys.argv[1]), LoadOptions(threads=1, context_size=64, mmap=sys.argv[2] == "mapped"))
print(json.dumps([advised_bytes()]))
"""


@needs_madvise
@pytest.mark.parametrize("how", ["mapped", "read"])
def test_weights_that_are_repacked_or_read_ask_for_huge_pages(how: str, tmp_path: Path) -> None:
    """Most of a mapped Q4_0 file is repacked, on a processor with AVX2."""
    if how == "mapped" and platform.machine() != "x86_64":
        pytest.skip("which weights llama.cpp repacks depends on the processor")
    if how == "mapped" and not amx_is_sound():
        pytest.skip("nothing is repacked where AMX tiles are broken")
    wide, path = tmp_path / "wide.gguf", tmp_path / "q4_0.gguf"
    llama(wide, layers=4, width=1024)
    quantize(wide, path, "Q4_0")
    (advised,) = run(LOAD, str(path), how)
    assert 0.6 < advised / path.stat().st_size < 1.3
    assert run(LOAD, str(path), how, GLIBC_TUNABLES="glibc.malloc.hugetlb=0") == [0]


OPEN = """
import json, mmap, sys
from pathlib import Path
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
before = huge_bytes()
with mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
    memory.madvise(14)
    memory.write(bytes(len(memory)))
    granted = huge_bytes() - before
model = load(Path(sys.argv[1]), LoadOptions(threads=1, context_size=16384))
before = huge_bytes()
session = model.open_session()
print(json.dumps([huge_bytes() - before, granted]))
"""


@needs_madvise
def test_a_cache_is_in_huge_pages(tmp_path: Path) -> None:
    """48 MiB, cleared before its context is returned: asking afterwards would be too late."""
    huge, granted = run(OPEN, str(TARGET))
    if not granted:
        pytest.skip("the kernel grants no huge pages now")
    assert 40 << 20 <= huge <= 60 << 20
    assert run(OPEN, str(TARGET), GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[0] == 0
