"""Draft models that are opened as networks, trained and saved: both runtimes say what the network says."""

from __future__ import annotations

import json
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load as load_mlx_lm
from mlx_lm.models.bitlinear_layers import bitnet_quantize

from edgespec.errors import BackendError, CacheError, DraftRefused, EdgespecError, InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from edgespec.train.memory_estimate import estimate_training_bytes
from edgespec.train.student import Student
from tests.formats.head_files import write_eagle3
from tests.gguf_models import DRAFT, REPOSITORY, GgufBuilder, sliding_window
from tests.mlx_models import CONFIGS, DENSE, make_folder, make_model, save
from tests.train.drafts import LOW_BIT, NAMES, TEXT, make_draft, read_network, read_runtime, ternary, train

FIXTURES = REPOSITORY / "tests" / "fixtures"
MODES: dict[str, Callable[[Student], None]] = {"lora": lambda s: s.train_lora(4), "all": lambda s: s.train_all()}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "all") for name in NAMES), ("packaged", "lora"), ("q4_k.gguf", "lora"), ("4-bit-folder", "lora")],
)
def test_what_is_trained_is_saved(name: str, mode: str, parent: Path, tmp_path: Path) -> None:
    """Both runtimes say what the network says, before and after training."""
    path, tolerance = make_draft(name, parent)
    mx.random.seed(0)  # of LoRA's matrices
    student = Student.open(path)
    before = read_network(student)
    assert student.vocab_size == before.shape[-1] and not tree_flatten(student.network.trainable_parameters())
    assert np.abs(before - read_runtime(path)).max() <= tolerance
    MODES[mode](student)
    losses = train(student)
    assert losses[-1] < losses[0] - 1
    trained = read_network(student)
    moved = np.abs(trained - before).max()
    assert moved > 5
    student.save(tmp_path / "saved")
    rounding = 0.2 * moved if name in LOW_BIT else tolerance
    said = read_runtime(tmp_path / "saved")
    assert np.abs(said - trained).max() <= rounding
    assert np.abs(said - read_network(Student.open(tmp_path / "saved"))).max() <= tolerance
    assert np.abs(read_network(student) - trained).max() <= 0.001


@pytest.mark.parametrize("name", ["packaged", "f16", "q4_k.gguf", "llama3.gguf"])
def test_a_file_that_did_not_change_is_the_same_file(name: str, parent: Path, tmp_path: Path) -> None:
    """Quantizing again what was dequantized would change it."""
    path, _ = make_draft(name, parent)
    student = Student.open(path)
    student.train_lora(4)
    student.save(tmp_path / "saved.gguf")
    assert (tmp_path / "saved.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["packaged", "q4_k.gguf", "llama3.gguf"])
def test_a_saved_file_has_the_metadata_and_the_types_of_its_base(name: str, parent: Path, tmp_path: Path) -> None:
    path, _ = make_draft(name, parent)
    student = Student.open(path)
    student.train_all()
    train(student)
    student.save(tmp_path / "saved.gguf")
    base, saved = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "saved.gguf")
    assert [(key, each.types, each.contents()) for key, each in saved.fields.items()] == [
        (key, each.types, each.contents()) for key, each in base.fields.items()
    ]
    assert [(each.name, each.tensor_type, list(each.shape)) for each in saved.tensors] == [
        (each.name, each.tensor_type, list(each.shape)) for each in base.tensors
    ]
    same = {a.name for a, b in zip(saved.tensors, base.tensors, strict=True) if np.array_equal(a.data, b.data)}
    assert same == ({"rope_freqs.weight"} if name == "llama3.gguf" else set())


def test_types_that_quantizing_ruins_become_q8_0_where_weights_changed(tmp_path: Path) -> None:
    ternary(tmp_path / "ternary.gguf")
    student = Student.open(tmp_path / "ternary.gguf")
    student.train_lora(4)
    student.save(tmp_path / "same.gguf")
    student.train_all()
    train(student)
    student.save(tmp_path / "trained.gguf")
    name = "blk.0.attn_output.weight"
    kinds = {
        file: {each.name: each.type.name for each in read_file(tmp_path / f"{file}.gguf").tensors}[name]
        for file in ("same", "trained")
    }
    assert kinds == {"same": "TQ2_0", "trained": "Q8_0"}
    assert np.abs(read_runtime(tmp_path / "trained.gguf") - read_network(student)).max() <= 0.5


@pytest.mark.parametrize("name", ["tied-folder", "4-bit-folder"])
def test_a_saved_folder_is_one_of_mlx_lm(name: str, parent: Path, tmp_path: Path) -> None:
    path, _ = make_draft(name, parent)
    student = Student.open(path)
    student.train_lora(4)
    student.save(tmp_path / "same")
    base = mx.load(str(path / "model.safetensors"))
    same = mx.load(str(tmp_path / "same" / "model.safetensors"))
    assert base.keys() == same.keys()
    assert all(a.dtype == same[key].dtype and mx.array_equal(a, same[key]) for key, a in base.items())
    student.train_all()
    train(student)
    student.save(tmp_path / "saved")
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {file.name for file in path.iterdir()}
    assert (tmp_path / "saved" / "config.json").read_bytes() == (path / "config.json").read_bytes()
    network, tokenizer = load_mlx_lm(str(tmp_path / "saved"))
    trained = read_network(student)
    limit = 0.1 * np.abs(trained).max() if name in LOW_BIT else 0.001
    network.set_dtype(mx.float32)
    assert np.abs(np.array(network(mx.array([TEXT])))[0, -1] - trained).max() <= limit
    assert tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"


def change_config(folder: Path, **changes: object) -> Path:
    make_folder(folder, DENSE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def refused(kind: type[EdgespecError], path: Path) -> str:
    with pytest.raises(kind) as caught:
        Student.open(path)
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value.message


def with_pair(path: Path, key: str, value: int | str) -> Path:
    """A llama with one more pair of metadata; the weights of one layer are there."""
    m = GgufBuilder(path, "llama", layers=1, width=64)
    m.attention(heads=4, kv_heads=2, head_width=16)
    m.writer.add_feed_forward_length(128)
    (m.writer.add_string if isinstance(value, str) else m.writer.add_uint32)(key, value)
    m.embeddings(64)
    m.save()
    return path


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    sliding_window(tmp_path / "gemma.gguf")
    assert "this one is gemma3" in refused(InvalidModelFile, tmp_path / "gemma.gguf")
    mixture = with_pair(tmp_path / "mixture.gguf", "llama.expert_count", 4)
    assert "experts" in refused(InvalidModelFile, mixture)
    yarn = with_pair(tmp_path / "yarn.gguf", "llama.rope.scaling.type", "yarn")
    assert "scaled by yarn" in refused(InvalidModelFile, yarn)
    part = with_pair(tmp_path / "part.gguf", "split.count", 2)
    assert "one part of a split model" in refused(InvalidModelFile, part)
    assert "is a head (eagle3)" in refused(DraftRefused, write_eagle3(tmp_path / "head.gguf"))
    assert "there is no model" in refused(InvalidModelFile, tmp_path / "none.gguf")


def test_folders_of_other_kinds_are_refused(tmp_path: Path) -> None:
    unknown = change_config(tmp_path / "unknown", model_type="nonesuch")
    assert "nonesuch" in refused(InvalidModelFile, unknown)
    make_folder(tmp_path / "moe", CONFIGS["moe"])
    assert "mixture of experts" in refused(DraftRefused, tmp_path / "moe")
    settings = {"quant_method": "bitnet"}
    folder = change_config(tmp_path / "bitnet", quantization_config=settings)
    config = json.loads((folder / "config.json").read_text())
    save(folder, bitnet_quantize(make_model(config), settings), config)
    assert "q_proj.weight are packed" in refused(DraftRefused, folder)
    gpt2 = {"model_type": "gpt2", "n_ctx": 256, "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 256}
    folder = make_folder(tmp_path / "gpt2", {**gpt2, "layer_norm_epsilon": 1e-5})
    weights = mx.load(str(folder / "model.safetensors"))
    published = {name.removeprefix("model."): w.T if ".c_" in name else w for name, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), published)
    assert "mlx-lm changes its tensor model." in refused(DraftRefused, folder)
    for name in ("eagle3", "medusa"):
        assert f"is a head ({name})" in refused(DraftRefused, FIXTURES / "heads" / f"{name}-python-6m")


def test_without_mlx_the_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['mlx'] = None\n"
        "from pathlib import Path; from edgespec.train.trainee import open_student\n"
        "from edgespec.train.memory_estimate import estimate_training_bytes\n"
        "from edgespec.errors import EdgespecError\n"
        f"path = Path({str(DRAFT)!r})\n"
        "assert estimate_training_bytes(path, 1024) > 0\n"
        "try: open_student(path)\n"
        "except EdgespecError as error: print(type(error).__name__, error.message, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.startswith("BackendUnavailable a draft is trained by MLX, and MLX cannot be imported")
    assert "pip install 'edgespec[adapt]'" in done.stdout


@pytest.mark.parametrize("name", ["packaged", "tied-folder"])
def test_a_full_disk_leaves_nothing(name: str, parent: Path, tmp_path: Path) -> None:
    """A limit on the size of files makes the write fail midway, as a full disk would."""
    student, limits = Student.open(make_draft(name, parent)[0]), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(CacheError, match="cannot be written: the disk is full"):
            student.save(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_and_a_folder_is_not(parent: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "saved.gguf", tmp_path / "saved"
    file.write_text("before")
    Student.open(DRAFT).save(file)
    assert file.read_bytes() == DRAFT.read_bytes()
    student = Student.open(make_draft("tied-folder", parent)[0])
    student.save(folder)
    with pytest.raises(CacheError, match="cannot be written"):
        student.save(folder)
    for path in (file, folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert {each.name for each in tmp_path.iterdir()} == {"saved.gguf", "saved"}
    with pytest.raises(CacheError, match="cannot be written"):
        student.save(tmp_path / "missing" / "saved")


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    student = Student.open(DRAFT)
    norm = student.network.model.norm
    norm.weight = norm.weight * float("nan")
    with pytest.raises(BackendError, match="not finite numbers"):
        student.save(tmp_path / "saved.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("name", ["f16", "4-bit-folder"])
def test_memory_is_known_before(name: str, rank: int | None, tmp_path: Path) -> None:
    path, _ = make_draft(name, tmp_path)
    estimate = estimate_training_bytes(path, 512, rank=rank)
    student = Student.open(path)
    student.train_all() if rank is None else student.train_lora(rank)
    tokens = mx.random.randint(4, 4096, (1, 512))
    gradient = nn.value_and_grad(
        student.network, lambda: nn.losses.cross_entropy(student.network(tokens), tokens, reduction="mean")
    )
    optimizer = optimizers.AdamW(learning_rate=1e-4)
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in range(2):
        optimizer.update(student.network, gradient()[1])
        mx.eval(student.network.parameters(), optimizer.state)
    assert 0.7 * estimate <= mx.get_peak_memory() <= 1.3 * estimate
