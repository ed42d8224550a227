"""Files of trained heads that llama.cpp does not run, or on which it would abort the process: refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.engine.head_probe import HeadProbe
from edgespec.errors import EdgespecError, InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from tests.backends.assistant_heads import TARGET_WINDOWS, make_assistant, make_target
from tests.backends.dflash_heads import Dialect, make_dflash
from tests.backends.eagle3_heads import make_head
from tests.backends.mlx_pairs import read_spec
from tests.backends.mtp_heads import WIDTH, make_mixture, spec_of
from tests.contract.runtimes import prefill
from tests.gguf_models import DRAFT, TARGET, sliding_window

OPTIONS = LoadOptions(context_size=256, threads=1, mtp=True)


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, OPTIONS)
    yield model
    model.close()


def refuse(
    target: LlamaModel, path: Path, error: type[EdgespecError], match: str, spec: HeadSpec | None = None
) -> None:
    """The file is refused in one sentence, and the next thing to do is said."""
    spec = spec or read_head(path)
    assert spec is not None
    with pytest.raises(error, match=match) as caught:
        open_head(target, path, spec)
    assert "\n" not in caught.value.message and caught.value.hint


def refuse_cut(target: LlamaModel, path: Path, spec: HeadSpec) -> None:
    """The file is refused wherever it is cut short."""
    data = path.read_bytes()
    for size in (100, read_file(path).data_offset + 1000, len(data) - 5000):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidModelFile):
            open_head(target, path, spec)


def test_eagle3(target: LlamaModel, tmp_path: Path) -> None:
    made = make_head(tmp_path / "head.gguf")
    small = load(DRAFT, OPTIONS)
    refuse(small, made.path, Unsupported, "is a head for a hidden size of 256; the model has 128")
    small.close()
    for changes in ({"layers": (1, 2)}, {"norm_before_fc": "each"}, {"feeds_normed": True}):
        spec = replace(made.spec, **changes)  # type: ignore[arg-type]
        refuse(target, made.path, Unsupported, "runs EAGLE-3 heads over 3 layers", spec)
    with pytest.raises(InvalidModelFile):
        open_head(target, TARGET, made.spec)
    refuse_cut(target, made.path, made.spec)
    for max_id in (4096, -1):
        other = make_head(tmp_path / f"{max_id}.gguf", max_id=max_id)
        refuse(target, other.path, InvalidModelFile, "d2t names tokens that the model does not have")


def test_layers_that_the_target_does_not_give(target: LlamaModel, tmp_path: Path) -> None:
    """They are refused when a session is opened, which then has no tap."""
    path = make_dflash(tmp_path / "head.gguf")
    sliding_window(tmp_path / "target.gguf")
    windowed = load(tmp_path / "target.gguf", OPTIONS)
    other = make_dflash(tmp_path / "small.gguf", size=64)
    for model, file, spec, match in (
        (target, path, replace(Dialect().spec, layers=(1, 2, 3, 6)), "last hidden state of 'llama' models"),
        (target, path, replace(Dialect().spec, layers=(1, 2, 3, 7)), "reads layer 7, and the model has layers 0 to 5"),
        (windowed, other, replace(Dialect().spec, hidden_size=64), "hidden states of 'gemma3' models"),
    ):
        head, session = open_head(model, file, spec), model.open_session()
        with pytest.raises(Unsupported, match=match):
            head.open_session(session)
        session.close()
        head.close()
    windowed.close()


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        ({"attention__value_length": 16}, InvalidModelFile, "its keys and values differ in size"),
        ({"attention__head_count_kv": 3}, InvalidModelFile, "heads do not share keys evenly"),
        ({"attention__head_count": 0}, InvalidModelFile, "heads do not share keys evenly"),
        ({"rope__dimension_count": 64}, InvalidModelFile, "64 numbers of a head are rotated, and it has 32"),
        ({"rope__dimension_count": 15}, InvalidModelFile, "15 numbers of a head are rotated"),
        ({"rope__dimension_sections": 20}, InvalidModelFile, r"the sections \[20, 20, 20, 20\] of 32 numbers"),
        ({"embedding_length": 128}, InvalidModelFile, "fc.weight has the shape"),
        ({"block_size": 1}, Unsupported, "has blocks of 1 positions; those of 2 to 64 are run"),
        ({"block_size": 65}, Unsupported, "has blocks of 65 positions"),
        ({"hyper_connection_count": 2}, Unsupported, "of the kind DeepSeek V4's DSpark, which is not run"),
    ],
)
def test_dflash(
    target: LlamaModel, tmp_path: Path, keys: dict[str, int], error: type[EdgespecError], match: str
) -> None:
    path = make_dflash(tmp_path / "head.gguf", **keys)
    with pytest.raises(error, match=match):
        open_head(target, path, read_head(path) or Dialect().spec)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"selector_top_k": 0}, "its rows have 0 candidates"),
        ({"selector_top_k": 16}, "its rows have 16 candidates, and its states 256 numbers for their scores"),
        ({"selector_rank": 8}, "llama.cpp cannot load"),
        ({"conv_group_size": 7}, "llama.cpp cannot load"),
    ],
)
def test_dflash2(target: LlamaModel, tmp_path: Path, keys: dict[str, int], match: str) -> None:
    dialect = Dialect(has_selector=True)
    path = make_dflash(tmp_path / "head.gguf", dialect, **keys)
    with pytest.raises(EdgespecError, match=match):
        open_head(target, path, dialect.spec)


def test_tokens_of_dflash(target: LlamaModel, tmp_path: Path) -> None:
    path = make_dflash(tmp_path / "head.gguf")
    for token, named in ((None, "none"), (4096, "4,096 of 4,096")):
        spec = replace(Dialect().spec, mask_token=token)
        refuse(target, path, Unsupported, f"a token of the model, and its file names {named}", spec)
    refuse_cut(target, path, Dialect().spec)
    for max_id in (4096, -1):
        reduced = make_dflash(tmp_path / f"{max_id}.gguf", Dialect(is_reduced=True), max_id=max_id)
        refuse(target, reduced, InvalidModelFile, "d2t names tokens that the model does not have")


def test_mtp_layers(target: LlamaModel, tmp_path: Path) -> None:
    file = make_mixture(tmp_path / "model.gguf")
    refuse(target, file, Unsupported, f"a head for a hidden size of {WIDTH}; the model has 256")
    wide = make_mixture(tmp_path / "wide.gguf", width=256, is_alone=True)
    refuse(target, wide, Unsupported, r"wide\.gguf has the MTP layer of another model")
    plain = load(file, replace(OPTIONS, mtp=False))
    refuse(plain, file, Unsupported, "was loaded without its MTP layers")
    prefill(plain.open_session(), [5, 6, 7])
    plain.close()
    model = load(file, OPTIONS)
    refuse(model, make_mixture(tmp_path / "other.gguf"), Unsupported, "draft for the model in that file alone")
    two = make_mixture(tmp_path / "two.gguf", chained=2, is_alone=True)
    refuse(model, two, Unsupported, "has 2 MTP layers; llama.cpp runs one")
    for name in ("hnorm", "ffn_gate_inp"):
        less = make_mixture(tmp_path / f"{name}.gguf", left_out=(name,), is_alone=True)
        refuse(model, less, InvalidModelFile, f"lacks (nextn.)?{name}")
    cut = make_mixture(tmp_path / "cut.gguf", is_alone=True)
    refuse_cut(model, cut, spec_of(cut))
    model.close()


def test_assistants(target: LlamaModel, tmp_path: Path) -> None:
    head, wide = make_assistant(tmp_path / "head.gguf"), make_assistant(tmp_path / "wide.gguf", hidden=256)
    refuse(target, head, Unsupported, "for a hidden size of 64; the model has 256")
    refuse(target, wide, Unsupported, "is the assistant of another model")
    gemma = load(make_target(tmp_path / "target.gguf"), OPTIONS)
    refuse(gemma, wide, Unsupported, "for a hidden size of 256; the model has 64")
    data, key = head.read_bytes(), b"gemma4-assistant.nextn_predict_layers"
    at = data.index(key) + len(key) + 4
    (tmp_path / "two.gguf").write_bytes(data[:at] + b"\x02" + data[at + 1 :])
    refuse(gemma, tmp_path / "two.gguf", InvalidModelFile, "not all of its layers are the assistant's")
    result = HeadProbe(gemma, head, "llamacpp", n_tokens=40).run(read_spec(head))
    assert result.chosen == result.stated
    gemma.close()
    for name, settings in (("heads", {"kv_heads": 4}), ("turned", {"windows": TARGET_WINDOWS[::-1]})):
        other = load(make_target(tmp_path / f"{name}.gguf", **settings), OPTIONS)  # type: ignore[arg-type]
        refuse(other, head, Unsupported, "is the assistant of another model")
        other.close()
