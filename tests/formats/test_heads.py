"""What files of heads say of them: GGUF metadata, the dialects of config.json, names and shapes of tensors."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from edgespec.errors import CacheError, InvalidModelFile
from edgespec.formats.gguf import FileSource
from edgespec.formats.head_config import read_config_head
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import read_safetensors_shapes
from tests.formats.ggufs import write_gguf
from tests.formats.head_files import (
    H,
    V,
    eagle3_shapes,
    pack_header,
    write,
    write_assistant,
    write_dflash,
    write_eagle3,
    write_folder,
    write_mtp,
    write_state,
)

LAYER = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
EAGLE = {"fc.weight": (H, 2 * H), **{f"layers.0.{name}.weight": (H, H) for name in LAYER}}
DFLASH = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "layers.0.input_layernorm.weight": (H,)}
MTP = {"mtp.fc.weight": (H, 2 * H), "mtp.pre_fc_norm_hidden.weight": (H,), "mtp.layers.0.input_layernorm.weight": (H,)}
TRUNK = {"model.layers.0.input_layernorm.weight": (H,), "model.embed_tokens.weight": (V, H)}
LLAMA = {"model_type": "llama", "hidden_size": H, "vocab_size": V, "num_hidden_layers": 1}


def spec(kind: Any, layers: tuple[int, ...] | None = (), **others: Any) -> HeadSpec:
    return HeadSpec(kind, H, layers, others.pop("size", H), **others)


def test_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "h.gguf"
    assert read_head(write_eagle3(file)) == spec("eagle3", (2, 16, 29), norm_before_residual=True)
    assert read_head(write_eagle3(file, norm_before_fc=True)).norm_before_fc == "all"  # type: ignore[union-attr]
    blocks = {"block_size": 16, "mask_token": 7}
    assert read_head(write_dflash(file)) == spec("dflash", (2, 10), **blocks)
    assert read_head(write_dflash(file, markov=True)) == spec("dspark", (2, 10), predicts_at_root=True, **blocks)
    assert read_head(write_dflash(file, block=None)) == spec("dflash", (2, 10), **blocks), "as llama.cpp reads it"
    with pytest.raises(InvalidModelFile, match=r"dflash\.block_size is missing"):
        read_head(write_dflash(file, markov=True, block=None))
    assert read_head(write_mtp(file, trunk=False)) == spec("mtp", feeds_normed=True)
    assert read_head(write_mtp(file, trunk=True)) == spec("mtp", feeds_normed=True, in_target=True)
    assert read_head(write_assistant(file)) == spec("gemma4-assistant", size=H // 2, feeds_normed=True)


def test_models_hold_no_head(tmp_path: Path) -> None:
    assert read_head(write_gguf(tmp_path / "m.gguf")) is None
    without = write(tmp_path / "cut.gguf", "qwen3next", {"embedding_length": H, "nextn_predict_layers": 1}, {"x": (4,)})
    assert read_head(without) is None
    assert read_head(write_folder(tmp_path / "m", {**LLAMA, "num_hidden_layers": 2}, TRUNK)) is None
    assert read_head(write_folder(tmp_path / "stated", {**LLAMA, "mtp_num_hidden_layers": 1}, TRUNK)) is None
    vision = {**LLAMA, "model_type": "eagle_chat", "architectures": ["Eagle2_5_VLForConditionalGeneration"]}
    assert read_head(write_folder(tmp_path / "vision", vision, TRUNK)) is None
    assert read_head(tmp_path / "absent") is None
    (tmp_path / "notes.txt").write_text("no model")
    assert read_head(tmp_path / "notes.txt") is None
    (tmp_path / "empty").mkdir()
    assert read_head(tmp_path / "empty") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "names no layers"),
        ({"layers": (2, 5)}, r"fc\.weight has the shape \(24, 8\), where its metadata asks for \(16, 8\)"),
        ({"layers": (2, 5, 9999)}, "names the layers 2, 5, 9999"),
        ({"target_hidden_size": 0}, "target_hidden_size is 0"),
        ({"target_hidden_size": 16}, r"fc\.weight has the shape"),
        ({"leave_out": "fc.weight"}, r"fc\.weight is missing, where its metadata asks"),
    ],
)
def test_gguf_heads_that_contradict_themselves(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelFile, match=message):
        read_head(write_eagle3(tmp_path / "h.gguf", **changes))


EAGLE3 = {**LLAMA, "draft_vocab_size": 32}
NVIDIA = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True}
SPECULATORS = {"speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": LLAMA, "draft_vocab_size": 32}


@pytest.mark.parametrize(
    ("config", "shapes", "expected"),
    [
        pytest.param({**EAGLE3, "architectures": ["LlamaForCausalLMEagle3"]}, eagle3_shapes(),
                     spec("eagle3", None), id="SafeAI"),
        pytest.param(EAGLE3, eagle3_shapes(), spec("eagle3", None), id="AngelSlim"),
        pytest.param({}, eagle3_shapes(), spec("eagle3", None), id="EAGLE-3 by its tensors"),
        pytest.param({**EAGLE3, "eagle_config": NVIDIA}, eagle3_shapes(), spec("eagle3", (2, 16, 29)), id="NVIDIA"),
        pytest.param({**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}}, eagle3_shapes(features=1),
                     spec("eagle3", ()), id="NVIDIA with the last state"),
        pytest.param({**EAGLE3, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": NVIDIA,
                      "target_hidden_size": H}, eagle3_shapes(), spec("eagle3", (2, 16, 29)), id="SpecForge"),
        pytest.param({**SPECULATORS, "architectures": ["Eagle3Speculator"], "norm_before_residual": True,
                      "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, eagle3_shapes("layers.0."),
                     spec("eagle3", (2, 16, 29), norm_before_residual=True), id="speculators"),
        pytest.param({**EAGLE3, "norm_output": True},
                     {**eagle3_shapes(), **{f"fc_norm.{i}.weight": (H,) for i in range(3)}},
                     spec("eagle3", None, norm_before_fc="each", feeds_normed=True), id="EAGLE-3.1"),
        pytest.param({**EAGLE3, "norm_before_fc": True}, {}, spec("eagle3", None, norm_before_fc="all"),
                     id="config alone"),
        pytest.param(LLAMA, EAGLE, spec("eagle"), id="EAGLE-1 by its tensors"),
        pytest.param({**LLAMA, "architectures": ["LlamaForCausalLMEagle"]}, EAGLE, spec("eagle"), id="EAGLE, SGLang"),
        pytest.param({**LLAMA, "architectures": ["DFlashDraftModel"], "block_size": 16,
                      "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9]}}, DFLASH,
                     spec("dflash", (2, 10), block_size=16, mask_token=7), id="z-lab"),
        pytest.param({**LLAMA, "speculators_config": {"algorithm": "dflash"}, "mask_token_id": 7, "block_size": 8,
                      "aux_hidden_state_layer_ids": [2, 10]}, DFLASH,
                     spec("dflash", (2, 10), block_size=8, mask_token=7), id="DFlash, speculators"),
        pytest.param({**LLAMA, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 9], "block_size": 7,
                      "mask_token_id": 7}, {**DFLASH, "markov_head.markov_w1.weight": (V, 4)},
                     spec("dspark", (2, 10), block_size=7, mask_token=7, predicts_at_root=True), id="DSpark"),
        pytest.param({**LLAMA, "speculators_config": {"algorithm": "dspark"}, "mask_token_id": 7, "block_size": 7,
                      "aux_hidden_state_layer_ids": [2, 10]}, DFLASH,
                     spec("dspark", (2, 10), block_size=7, mask_token=7), id="DSpark, speculators"),
        pytest.param({"medusa_num_heads": 2}, {f"{i}.{j}.weight": s for i in range(2) for j, s in
                      (("0.linear", (H, H)), ("1", (V, H)))}, spec("medusa"), id="Medusa, a matrix each"),
        pytest.param({"medusa_num_heads": 2}, {f"{i}.0.linear.weight": (H, H) for i in range(2)},
                     spec("medusa"), id="Medusa, the target's matrix"),
        pytest.param({"medusa_num_heads": 1}, {"0.0.linear.weight": (H, H), "0.1.linear.weight": (H, H),
                      "0.2.weight": (V, H)}, spec("medusa"), id="Medusa, two layers"),
        pytest.param({**LLAMA, "medusa_num_heads": 2}, {"medusa_head.0.0.linear.weight": (H, H), **TRUNK},
                     spec("medusa", in_target=True), id="Medusa with its target"),
        pytest.param({"hydra_num_heads": 4}, {"hydra_lm_head.0.1.weight": (V, H)},
                     spec("hydra"), id="Hydra"),
        pytest.param({"hydra_num_heads": 1}, {"hydra_mlp.0.1.linear.weight": (H, 2 * H), "hydra_lm_head.0.1.weight":
                      (V, H), "prefix_embeding_layer.layers.0.self_attn.q_proj.weight": (H, H)},
                     spec("hydra"), id="Hydra++"),
        pytest.param({"hydra_num_heads": 1}, {"hydra_mlp.0.0.linear.weight": (H, 2 * H)},
                     spec("hydra"), id="Hydra, the target's matrix"),
        pytest.param({"text_config": LLAMA}, {**MTP, **TRUNK},
                     spec("mtp", feeds_normed=True, in_target=True), id="HF MTP"),
        pytest.param(LLAMA, MTP, spec("mtp", feeds_normed=True), id="HF MTP cut out"),
        pytest.param(LLAMA, {name.removeprefix("mtp."): shape for name, shape in MTP.items()},
                     spec("mtp", feeds_normed=True), id="MTP without a prefix"),
        pytest.param(LLAMA, {"model.layers.61.eh_proj.weight": (H, 2 * H), **TRUNK},
                     spec("mtp", feeds_normed=True, in_target=True), id="DeepSeek MTP"),
        pytest.param({"model_type": "gemma4_assistant", "backbone_hidden_size": H,
                      "text_config": {**LLAMA, "hidden_size": 4}}, {},
                     spec("gemma4-assistant", size=4, feeds_normed=True), id="Gemma 4 assistant"),
    ],
)  # fmt: skip
def test_folders(tmp_path: Path, config: dict[str, Any], shapes: dict[str, Any], expected: HeadSpec) -> None:
    assert read_head(write_folder(tmp_path / "head", config, shapes)) == expected


def test_pickled_heads(tmp_path: Path) -> None:
    medusa = write_folder(tmp_path / "medusa", {"medusa_num_heads": 2}, {})
    write_state(medusa / "medusa_lm_head.pt", {"0.0.linear.weight": (H, H), "0.1.weight": (V, H)})
    assert read_head(medusa) == spec("medusa")
    eagle = write_folder(tmp_path / "eagle", LLAMA, {})
    write_state(eagle / "pytorch_model.bin", EAGLE)
    (eagle / "training_args.bin").write_bytes(b"not read")
    assert read_head(eagle) == spec("eagle")


@pytest.mark.parametrize(
    ("config", "shapes", "message"),
    [
        ({**EAGLE3, "hidden_size": 16}, eagle3_shapes(), "config.json the hidden size 16"),
        ({**EAGLE3, "target_hidden_size": 16}, eagle3_shapes(), "reads 24 values, not 3 times 16"),
        (EAGLE3, {**eagle3_shapes(), "fc.weight": (H,)}, "has the shape"),
        ({**EAGLE3, "eagle_aux_hidden_state_layer_ids": ["2"]}, eagle3_shapes(), "names the layers"),
        ({**EAGLE3, "eagle_aux_hidden_state_layer_ids": 2}, eagle3_shapes(), "names the layers"),
        (EAGLE3, {"fc.weight": (H, 3 * H)}, "lacks the tensor midlayer.input_layernorm.weight and 10 more"),
        ({**LLAMA, "dflash_config": {"target_layer_ids": [1, 2, 3]}}, DFLASH, "reads 16 values, not 3 times 8"),
    ],
)
def test_folders_that_contradict_themselves(
    tmp_path: Path, config: dict[str, Any], shapes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidModelFile) as caught:
        read_head(write_folder(tmp_path / "head", config, shapes))
    assert message in caught.value.message and caught.value.hint


def test_shapes_are_those_of_the_library(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "h", None, eagle3_shapes()) / "model.safetensors"
    with safe_open(file, framework="numpy") as opened:
        names = opened.keys()
        assert read_safetensors_shapes(FileSource(file), file.name) == {
            name: tuple(opened.get_slice(name).get_shape()) for name in names
        }


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {"shape": [2]}},
        {"a": {"shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"shape": ["2"], "data_offsets": [0, 8]}},
        {"a": {"shape": [2], "data_offsets": [8, 0]}},
        {"a": {"shape": [2], "data_offsets": [0, 2**60]}},
    ],
)
def test_damaged_safetensors(tmp_path: Path, header: Any) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack_header(header) + bytes(8))
    with pytest.raises(InvalidModelFile):
        read_head(tmp_path)
    with pytest.raises(CacheError, match="cannot be read"):
        read_safetensors_shapes(FileSource(tmp_path / "absent.safetensors"), "absent")


with TemporaryDirectory() as _name:
    GGUF = write_eagle3(Path(_name) / "h.gguf").read_bytes()
    SAFETENSORS = (write_folder(Path(_name), EAGLE3, eagle3_shapes()) / "model.safetensors").read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.data())
def test_cut_anywhere(scratch: Path, which: int, data: st.DataObject) -> None:
    content = (GGUF, SAFETENSORS)[which]
    file = scratch / ("h.gguf", "model.safetensors")[which]
    file.write_bytes(content[: data.draw(st.integers(4, len(content) - 1))])
    with pytest.raises(InvalidModelFile):
        read_head((file, scratch)[which])


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1), st.data())
def test_flipped_bits(scratch: Path, which: int, data: st.DataObject) -> None:
    """A head, none, or a refusal."""
    content = bytearray((GGUF, SAFETENSORS)[which])
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file = scratch / ("h.gguf", "model.safetensors")[which]
    file.write_bytes(content)
    try:
        found = read_head((file, scratch)[which])
    except InvalidModelFile:
        return
    assert found is None or isinstance(found, HeadSpec)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(st.sampled_from([*EAGLE3, *NVIDIA, "dflash_config", "target_layer_ids"]), each)
    ),
)
KEYS = ("architectures", "block_size", "dflash_config", "eagle_config", "hidden_size", "mask_token_id", "text_config")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KEYS), NESTED)
def test_any_value_in_the_config(key: str, value: Any) -> None:
    """A head, none, or a refusal."""
    try:
        found = read_config_head({**EAGLE3, key: value}, {})
    except InvalidModelFile:
        return
    assert found is None or isinstance(found, HeadSpec)
