"""A memory whose files are damaged, cannot be opened, or have no room on the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.memory.memory import Memory
from tests.memory.texts import build, find_bytes, has_text, make_tokens

LIMIT = 2**30
SEGMENTS = "*.segment"


def test_a_damaged_database_is_set_aside(folder: Path) -> None:
    folder.mkdir()
    (folder / "memory.db").write_bytes(b"not a database " * 1000)
    memory = Memory(folder, "tokenizer", LIMIT)
    notice = memory.take_notice()
    assert notice is not None and "It is renamed to memory.db.damaged-1, and a new file is used." in notice
    memory.space("").add(make_tokens(0, 5000), 0, None)
    memory.flush()
    assert memory.take_notice() is None
    memory.close()
    assert find_bytes(folder, make_tokens(0, 5000)) == {"memory.db"}


def test_damaged_tokens_are_not_read(folder: Path) -> None:
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("").add(make_tokens(0, 5000), 0, None)
    memory.close()
    data = bytearray((folder / "memory.db").read_bytes())
    place = data.index(np.array(make_tokens(0)[3000:3004], np.uint32).tobytes())
    data[place] ^= 1
    (folder / "memory.db").write_bytes(data)
    memory = Memory(folder, "tokenizer", LIMIT)
    build(memory)
    assert memory.space("").find(make_tokens(0)[:100], 1) is None
    memory.space("").add(make_tokens(1), 0, None)
    build(memory)
    assert has_text(memory.space(""), make_tokens(1)) and memory.take_notice() is None
    memory.close()


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "empty"])
def test_segments_are_built_again(folder: Path, damage: str) -> None:
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("").add(make_tokens(0), 0, None)
    build(memory)
    memory.close()
    (segment,) = folder.glob(SEGMENTS)
    data = segment.read_bytes()
    if damage == "missing":
        segment.unlink()
    else:
        flipped = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
        segment.write_bytes({"truncated": data[:-1], "flipped": flipped, "empty": b""}[damage])
    memory = Memory(folder, "tokenizer", LIMIT)
    space = memory.space("")
    assert not space.index.files and has_text(space, make_tokens(0))
    build(memory)
    assert len(space.index.files) == 1 and not space.index.live and has_text(space, make_tokens(0))
    (built,) = folder.glob(SEGMENTS)
    assert built.name != segment.name and len(built.read_bytes()) == len(data)
    memory.close()


def test_a_segment_that_cannot_be_opened_for_now_is_kept(folder: Path) -> None:
    """As where too many files are open."""
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("").add(make_tokens(0), 0, None)
    build(memory)
    memory.close()
    (segment,) = folder.glob(SEGMENTS)
    whole = segment.rename(folder / "whole")
    segment.symlink_to(segment.name)  # OSError: too many links
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("").add(make_tokens(1, 500), 0, None)
    build(memory)
    assert has_text(memory.space(""), make_tokens(1, 500))
    memory.close()
    assert segment.is_symlink()
    whole.replace(segment)
    memory = Memory(folder, "tokenizer", LIMIT)
    assert len(memory.space("").index.files) == 1 and has_text(memory.space(""), make_tokens(0))
    memory.close()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from edgespec.memory.memory import Memory
from tests.memory.texts import has_text, make_tokens
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
memory = Memory(Path(sys.argv[1]), "tokenizer", 2**30)
space = memory.space("")
space.add(make_tokens(0), 0, None)
memory.flush()
assert memory.take_notice() is None
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
memory.set_idle(True)
for seed in (1, 2):
    space.add(make_tokens(seed), 0, None)
    memory.flush()
print(memory.take_notice())
print(memory.take_notice(), [has_text(space, make_tokens(seed)) for seed in range(3)])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
memory.close()
"""


def test_a_full_disk(folder: Path) -> None:
    """Files may not grow, then they may again: texts are found all the time, and stored as soon as that is possible."""
    command = [sys.executable, "-c", FULL_DISK, str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    notice, rest = child.stdout.splitlines()
    assert "cannot be" in notice and "Earlier texts are not stored." in notice
    assert rest == "None [True, True, True]"
    memory = Memory(folder, "tokenizer", LIMIT)
    assert all(has_text(memory.space(""), make_tokens(seed)) for seed in range(3))
    memory.close()
