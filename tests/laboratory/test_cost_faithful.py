"""A small model embedded in a larger shape computes the same function, in every format and type."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path

import click
import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from edgespec.backends.llamacpp.quantize import quantize
from laboratory import cost_faithful
from laboratory.cost_faithful import build, check
from laboratory.embedding import vocabulary
from laboratory.embedding.agreement import PROMPTS, Agreement, open_for_check
from laboratory.embedding.encodings import FolderStorage, GgufStorage
from laboratory.embedding.files import write
from laboratory.embedding.layout import list_tensors
from laboratory.embedding.shapes import SHAPES, Shape, Size
from laboratory.embedding.sources import open_source
from tests.gguf_models import DRAFT, TARGET, GgufBuilder, llama, sliding_window
from tests.mlx_models import DENSE, make_folder

# A little larger than the packaged draft model and the random ones; rows are whole super-blocks.
TINY = Size(width=256, layers=3, kv_width=128, ffn=512)
COARSE = ("Q4_0", "Q4_K", "4bit")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged draft model as a folder, in its own shape."""
    path = tmp_path_factory.mktemp("source") / "draft"
    small = open_source(DRAFT)
    write(small, path, small.shape, FolderStorage("F32", 32))
    return path


def agreement(source: Path, built: Path, quant: str) -> Agreement:
    """The agreement with the small model quantized in the same way; that with the small model as it is is asserted."""
    build(source, built, "tiny", quant, 32)
    rounded, exact = check(source, built, "tiny", quant, 32, tokens=8)
    assert rounded.faults == 0
    assert rounded.equal >= rounded.tokens - 1
    assert exact.equal >= exact.tokens * (0.6 if quant in COARSE else 0.95)
    return rounded


def test_the_stated_context(tmp_path: Path, folder: Path) -> None:
    build(DRAFT, tmp_path / "large.gguf", "tiny", context=4096)
    fields = gguf.GGUFReader(tmp_path / "large.gguf").fields
    assert fields["llama.context_length"].contents() == 4096
    build(folder, tmp_path / "large", "tiny", context=4096)
    assert json.loads((tmp_path / "large" / "config.json").read_text())["max_position_embeddings"] == 4096


@pytest.mark.parametrize("quant", ["Q8_0", "F16", "Q4_0", "Q4_K"])
def test_gguf_files(tmp_path: Path, quant: str) -> None:
    built = tmp_path / "large.gguf"
    agreement(DRAFT, built, quant)
    assert open_source(built).shape == TINY.with_heads(64) == Shape(256, 3, 4, 2, 512, 64)
    assert [file.name for file in tmp_path.iterdir()] == ["large.gguf"]


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "8bit", "4bit"])
def test_folders(tmp_path: Path, quant: str) -> None:
    built = tmp_path / "large"
    found = agreement(DRAFT, built, quant)
    assert quant != "F32" or found.largest < 1e-3
    assert open_source(built).shape == TINY.with_heads(64)
    stored = json.loads((built / "config.json").read_text()).get("quantization")
    assert stored == ({"group_size": 32, "bits": int(quant[0]), "mode": "affine"} if "bit" in quant else None)


@pytest.mark.parametrize("quant", ["Q8_0", "F16"])
def test_kv_groups_that_grow(tmp_path: Path, quant: str) -> None:
    llama(tmp_path / "small.gguf")  # two groups of two heads, which share blocks, and a head of its own
    agreement(tmp_path / "small.gguf", tmp_path / "large.gguf", quant)
    assert open_source(tmp_path / "large.gguf").shape.group == 2
    assert not open_source(tmp_path / "large.gguf").tied


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize(("name", "quant"), [("large.gguf", "F16"), ("large", "F32")])
def test_folders_as_sources(tmp_path: Path, bits: int | None, name: str, quant: str) -> None:
    source = make_folder(tmp_path / "small", DENSE, bits=bits)  # heads wider than width / heads
    agreement(source, tmp_path / name, quant)


def test_a_folder_of_a_gguf_file_and_back(tmp_path: Path, folder: Path) -> None:
    build(folder, tmp_path / "large.gguf", "tiny", "F16")
    back, first = (gguf.GGUFReader(path).fields for path in (tmp_path / "large.gguf", DRAFT))
    for key in (key for key in first if key.startswith("tokenizer.")):
        assert back[key].contents() == first[key].contents(), key
    rounded, exact = check(folder, tmp_path / "large.gguf", "tiny", "F16", tokens=8)
    assert rounded.faults == 0 and exact.equal >= exact.tokens - 2


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe"])
def test_both_runtimes_cut_text_alike(tmp_path: Path, folder: Path, cut: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    fields = {field.key: field.value for field in open_source(DRAFT).gguf_fields()}
    files = vocabulary.to_folder({**fields, "tokenizer.ggml.pre": cut})
    source = make_folder(tmp_path / "source", DENSE)
    for name, data in files.items():
        (source / name).write_bytes(data)
    assert json.loads(files["tokenizer.json"])["model"]["vocab"] == tokenizer["model"]["vocab"]
    build(source, tmp_path / "large.gguf", "tiny", "Q8_0")
    mlx, llamacpp = (open_for_check(path) for path in (source, tmp_path / "large.gguf"))
    for text in (*PROMPTS, "We'LL pay 1234567 for\n\n  thé  ---\r\n x  ", "don't 12.5% ", "<|user|>hi<|end|>"):
        assert mlx.tokenizer.encode(text, parse_special=True) == llamacpp.tokenizer.encode(text, parse_special=True)
    for model in (mlx, llamacpp):
        model.close()


@pytest.mark.parametrize(("layers", "tied"), [(12, True), (80, False)])
def test_q4_k_is_the_mixture_of_llama_cpp(tmp_path: Path, layers: int, tied: bool) -> None:
    llama(tmp_path / "small.gguf")
    small = open_source(DRAFT if tied else tmp_path / "small.gguf")
    large = Shape(256, layers, 256 // small.shape.head, 64 // small.shape.head, 512 if tied else 256, small.shape.head)
    write(small, tmp_path / "large.gguf", large, GgufStorage("F16", large, tied))
    quantize(tmp_path / "large.gguf", tmp_path / "llama.gguf", "Q4_K_M")
    storage = GgufStorage("Q4_K", large, tied)
    ours = list_tensors(large, small.shape, small.vocab_size, tied=tied, rotations=False)
    theirs = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "llama.gguf").tensors}
    assert {f"{tensor.name}.weight": storage.encoding(tensor).type for tensor in ours} == theirs


def test_another_function_is_told_apart(tmp_path: Path) -> None:
    small, large = open_source(DRAFT), TINY.with_heads(64)
    built = tmp_path / "large.gguf"
    weights = small.weights
    small.weights = lambda name: -weights(name) if name == "blk.1.ffn_down" else weights(name)  # type: ignore
    write(small, built, large, GgufStorage("Q8_0", large, small.tied))
    rounded, _ = check(DRAFT, built, "tiny", "Q8_0", tokens=4)
    assert rounded.faults > 4


def refused(source: Path, destination: Path, shape: str = "tiny", quant: str | None = None, group: int = 64) -> str:
    with pytest.raises(click.ClickException) as caught:
        build(source, destination, shape, quant, group)
    assert "\n" not in caught.value.message and caught.value.message.endswith(".")
    return caught.value.message


def test_shapes_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.gguf"
    assert "does not fit into the tiny shape: layers 6 > 3" in refused(TARGET, out)
    monkeypatch.setitem(SHAPES, "odd", Size(width=160, layers=3, kv_width=160, ffn=512))
    assert "heads of 64 numbers" in refused(DRAFT, out, "odd")
    monkeypatch.setitem(SHAPES, "narrow", Size(width=192, layers=3, kv_width=64, ffn=512))
    assert "Q6_K needs rows of whole blocks of 256, not of 192" in refused(DRAFT, out, "narrow", "Q4_K")
    assert list(tmp_path.iterdir()) == []


def test_sources_that_are_not_plain_llamas(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    (tmp_path / "text.gguf").write_text("text")
    assert "cannot be read as GGUF" in refused(tmp_path / "text.gguf", out)
    sliding_window(tmp_path / "gemma.gguf")
    assert "not a llama" in refused(tmp_path / "gemma.gguf", out)
    maker = GgufBuilder(tmp_path / "bias.gguf", "llama", layers=1, width=64)
    maker.attention(heads=4, kv_heads=2, head_width=16)
    maker.writer.add_feed_forward_length(128)
    maker.ones("blk.0.attn_q.bias", 64)
    maker.save()
    assert "blk.0.attn_q.bias, which no plain llama has" in refused(tmp_path / "bias.gguf", out)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty", out)
    mistral = make_folder(tmp_path / "mistral", DENSE)
    (mistral / "config.json").write_text(json.dumps({**DENSE, "model_type": "mistral"}))
    assert "not a llama" in refused(mistral, out)
    (mistral / "config.json").write_text(json.dumps(DENSE))
    assert "vocab_size" in refused(mistral, out)


def test_scaled_rotations_stay_in_their_form(tmp_path: Path) -> None:
    small, source = open_source(DRAFT), tmp_path / "small.gguf"
    weights, frequencies = small.weights, np.linspace(1, 4, 32, dtype=np.float32)
    small.rotations = True
    small.weights = lambda name: frequencies if name == "rope_freqs" else weights(name)  # type: ignore
    write(small, source, small.shape, GgufStorage("F16", small.shape, small.tied))
    agreement(source, tmp_path / "large.gguf", "F16")
    assert (open_source(tmp_path / "large.gguf").weights("rope_freqs") == frequencies).all()
    assert "embed its Hugging Face folder instead" in refused(source, tmp_path / "out")
    scaled = make_folder(tmp_path / "scaled", {**DENSE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert "embed its GGUF file instead" in refused(scaled, tmp_path / "out.gguf")
    build(scaled, tmp_path / "out", "tiny", "F32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]["factor"] == 2.0


def test_destinations_that_cannot_be_written(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Q4_K, not 4bit" in refused(DRAFT, tmp_path / "out.gguf", quant="4bit")
    assert "F32, not Q4_0" in refused(DRAFT, tmp_path / "out", quant="Q4_0")
    assert "none does not exist" in refused(DRAFT, tmp_path / "none" / "out.gguf")
    assert "new or empty folder" in refused(DRAFT, folder)
    llama(tmp_path / "narrow.gguf")
    assert "groups of 64 would mix" in refused(tmp_path / "narrow.gguf", tmp_path / "out")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9))
    assert "8b.gguf takes 3.9 GB" in refused(DRAFT, tmp_path / "8b.gguf", "8b")
    assert "8b takes 3.9 GB" in refused(DRAFT, tmp_path / "8b", "8b")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["30m", str(tmp_path / "a.gguf"), "--source", str(DRAFT), "--check"]
    result = CliRunner().invoke(cost_faithful.main, arguments)
    assert result.exit_code == 0, result.output
    assert "quantized in the same way" in result.output and " of 128 tokens agree" in result.output
    bad = Agreement(tokens=128, equal=120, faults=3, largest=1.0)
    monkeypatch.setattr(cost_faithful, "check", lambda *_: [bad, bad])
    result = CliRunner().invoke(cost_faithful.main, arguments)
    assert result.exit_code == 1 and "does not compute" in result.output
