"""Every type of every kind of tensor: refused by the check of the header, or computed with; llama.cpp never dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.formats.ggml_types import GGML_TYPES
from edgespec.train.student import copy_fields, finish_gguf
from tests.gguf_models import REPOSITORY, llama

ROLES = ("token_embd", "output_norm", "output", "blk.0.attn_norm", "blk.0.attn_q", "blk.0.ffn_down")
WIDTH = 256
NO_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
TYPES = {each: GGML_TYPES[each] for each in map(int, gguf.GGMLQuantizationType) if each in GGML_TYPES}
PROGRAM = """
import sys
from pathlib import Path
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Draft
from edgespec.core.decoding import read_prompt
from edgespec.errors import EdgespecError
from edgespec.formats.gguf_validate import read_file
for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    print(path.stem, end=" ", flush=True)
    try:
        read_file(path)
        model = load(path, LoadOptions(context_size=64, threads=1))
        session = model.open_session()
        read_prompt(session, [1, 2, 3])
        session.forward(4, Draft.chain([5, 6])).logits(0)
        session.close()
        model.close()
    except EdgespecError as error:
        print("refused", error.message, flush=True)
    else:
        print("computed", flush=True)
"""


def write_with_type(base: gguf.GGUFReader, path: Path, role: str, kind: int) -> None:
    """The model with random data of another type in one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    copy_fields(writer, base, lambda name: True)
    for tensor in base.tensors:
        data, dtype = tensor.data, tensor.tensor_type
        if tensor.name == f"{role}.weight":
            dtype, layout = gguf.GGMLQuantizationType(kind), GGML_TYPES[kind]
            rows = data.shape[:-1]
            n_bytes = data.shape[-1] // layout.block_items * layout.block_bytes
            data = np.random.default_rng(0).integers(0, 60, (*rows, n_bytes), np.uint8)
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    finish_gguf(writer)


def test_no_type_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, layout in TYPES.items():  # of which the package counts one with other sizes
        sizes = layout.block_items, layout.block_bytes
        monkeypatch.setitem(gguf.GGML_QUANT_SIZES, gguf.GGMLQuantizationType(kind), sizes)
    llama(tmp_path / "base", layers=1, width=WIDTH)
    base = gguf.GGUFReader(tmp_path / "base")
    for role in ROLES:
        for kind, layout in TYPES.items():
            write_with_type(base, tmp_path / f"{role}-{layout.name}.gguf", role, kind)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout[-200:]} {done.stderr[-2000:]}"
    found = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert len(found) == len(ROLES) * len(TYPES)
    for role in ROLES:
        of_role = {name.rpartition("-")[2]: how for name, how in found.items() if name.startswith(f"{role}-")}
        computed = {kind for kind, how in of_role.items() if how == "computed"}
        assert computed == ({"F32"} if role.endswith("norm") else {each.name for each in TYPES.values()} - NO_WEIGHTS)
