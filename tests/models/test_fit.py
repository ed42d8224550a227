"""Memory prices against numbers worked out by hand, and the report when a pair does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends import device_memory
from edgespec.backends.mlx import library
from edgespec.errors import DoesNotFit
from edgespec.formats.ggml_types import GGML_TYPES
from edgespec.formats.gguf import Header, TensorInfo, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import Folder
from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory
from edgespec.models.fit import check_fit, estimate_head, estimate_memory, kv_bytes, score_bytes, shares_context
from edgespec.models.gpu_layers import Placement, place_layers
from edgespec.units import GIB
from tests.formats.ggufs import write_gguf


def llama_70b() -> Header:
    """The shape of Llama 3.3 70B Q4_K_M: 80 blocks, 8 KV heads of 128, 42.5 GB of weights."""
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": 80,
        "llama.embedding_length": 8192,
        "llama.feed_forward_length": 28672,
        "llama.attention.head_count": 64,
        "llama.attention.head_count_kv": 8,
        "llama.vocab_size": 128256,
    }
    weights = TensorInfo("w", (256, 295_138_889), GGML_TYPES[12], 0)
    return Header("70b.gguf", metadata, (weights,), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kv_type", "per_element"), [("f16", 2.0), ("f32", 4.0), ("q8_0", 34 / 32), ("q4_0", 18 / 32)])
def test_the_price_of_a_70b_model(kv_type: str, per_element: float) -> None:
    found = estimate_memory(llama_70b(), 8192, kv_type)
    assert (found.weights, found.kv) == (295_138_889 * 144, 8192 * 80 * 8 * 128 * 2 * per_element)
    assert 0.2 * GIB < found.compute < 0.6 * GIB


def test_heads_may_differ_by_block(tmp_path: Path) -> None:
    even = read_file(write_gguf(tmp_path / "even.gguf", blocks=4, kv_heads=1))
    uneven = read_file(write_gguf(tmp_path / "uneven.gguf", blocks=4, kv_heads=[2, 2, 1, 1]))
    assert kv_bytes(even, 100) == 100 * 4 * (64 + 64) * 2
    assert kv_bytes(uneven, 100) == 100 * 6 * (64 + 64) * 2
    even.metadata["llama.full_attention_interval"] = 4
    assert kv_bytes(even, 100) == 100 * (64 + 64) * 2, "of a hybrid model, the blocks with attention"
    even.metadata.update({"llama.attention.key_length": 192, "llama.attention.value_length": 128})
    assert kv_bytes(even, 100) == 100 * (192 + 128) * 2, "stated sizes of heads win"


def test_parts_of_a_split_model_are_priced_together(tmp_path: Path) -> None:
    one = read_file(write_gguf(tmp_path / "one.gguf"))
    two = read_file(write_gguf(tmp_path / "two.gguf", pad_bytes=4096))
    assert estimate_memory(join_parts([one, two]), 1).weights == one.weight_bytes + two.weight_bytes


def test_a_pair_that_fits_gives_the_numbers(tmp_path: Path) -> None:
    header = read_file(write_gguf(tmp_path / "m.gguf"))
    fit = check_fit(header, [(header, None)], context=512, memory=Memory(RESERVE_BYTES + GIB))
    assert fit.draft is not None
    assert fit.needed == fit.target.total + fit.draft.total
    assert fit.headroom == GIB - fit.needed


def test_what_does_not_fit_is_told_in_gib_with_ways_out(tmp_path: Path) -> None:
    draft = read_file(write_gguf(tmp_path / "draft.gguf", pad_bytes=2**24))
    memory = Memory(RESERVE_BYTES + 44 * GIB)
    with pytest.raises(DoesNotFit) as caught:
        check_fit(llama_70b(), [(draft, None)], context=32_768, memory=memory)
    assert "70b.gguf needs 50.0 GiB and 44.0 GiB are free" in caught.value.message
    assert "KV cache for 32,768 tokens 10.0 GiB" in caught.value.message
    assert "--draft ngram" in caught.value.hint
    assert "--ctx" in caught.value.hint and "--force" in caught.value.hint and "quantisation" in caught.value.hint
    forced = check_fit(llama_70b(), [(draft, None)], context=32_768, memory=memory, force=True)
    assert forced.headroom < 0


def test_texts_in_one_context_have_one_scratch_memory() -> None:
    header = llama_70b()
    assert shares_context(header)
    apart, together = estimate_memory(header, 1024, caches=8), estimate_memory(header, 1024, caches=8, together=True)
    assert together.kv == apart.kv == 8 * estimate_memory(header, 1024).kv
    assert (
        estimate_memory(header, 1024).compute
        < together.compute
        < apart.compute
        == 8 * estimate_memory(header, 1024).compute
    )
    enough = Memory(RESERVE_BYTES + together.total)
    assert check_fit(header, [], context=1024, memory=enough, caches=8, together=True).headroom == 0
    with pytest.raises(DoesNotFit):
        check_fit(header, [], context=1024, memory=enough, caches=8)
    header.metadata["llama.attention.sliding_window"] = 512
    assert not shares_context(header)


def head_8b() -> tuple[Header, HeadSpec]:
    """The shape of an EAGLE-3 head of Llama 3.1 8B with 32,000 draft tokens, and what it says of itself."""
    metadata: dict[str, object] = {
        "general.architecture": "eagle3",
        "eagle3.block_count": 1,
        "eagle3.embedding_length": 4096,
        "eagle3.attention.head_count": 32,
        "eagle3.attention.head_count_kv": 8,
        "eagle3.attention.key_length": 128,
        "eagle3.attention.value_length": 128,
    }
    weights = TensorInfo("w", (2**20,), GGML_TYPES[1], 0)
    header = Header("head.gguf", metadata, (weights,), 0)  # type: ignore[arg-type]
    return header, HeadSpec("eagle3", 4096, (2, 16, 29), 4096)


def test_the_price_of_a_head() -> None:
    header, spec = head_8b()
    found = estimate_head(header, spec, 8192)
    keys_and_values = 8192 * 2 * 8 * 128
    assert (found.weights, found.kv) == (2**21, keys_and_values * 2)
    assert estimate_head(header, spec, 8192, "q8_0", 3).kv == 3 * keys_and_values * 34 // 32
    waiting = 2048 * 3 * 4096 * 4
    assert waiting < found.compute < 2 * waiting, "hidden states of three layers, in single precision"
    assert estimate_head(header, replace(spec, in_target=True), 8192).weights == 0
    header.metadata.update({"eagle3.block_count": 33, "eagle3.nextn_predict_layers": 2})
    assert estimate_head(header, replace(spec, kind="mtp"), 8192).kv == 2 * found.kv, "of its own layers"
    assert estimate_head(header, replace(spec, kind="dflash"), 8192).kv == 33 * found.kv
    assert estimate_head(header, replace(spec, kind="gemma4-assistant"), 8192).kv == 0, "it reads the target's"


def test_the_price_of_a_heads_folder(tmp_path: Path) -> None:
    layer = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5}
    _, spec = head_8b()
    keys_and_values, states = 8192 * 2 * 8 * 128 * 2, 8192 * 4096 * 2
    for config in (layer, {"transformer_layer_config": layer}):  # the latter of speculators
        folder = Folder(tmp_path, "head", {"model_type": "llama", **config}, 2**21)
        assert estimate_head(folder, spec, 8192).kv == keys_and_values + states
        assert estimate_head(folder, replace(spec, kind="mtp"), 8192).kv == keys_and_values + states
        assert estimate_head(folder, replace(spec, kind="dflash"), 8192).kv == 5 * keys_and_values
        assert estimate_head(folder, replace(spec, kind="medusa"), 8192).kv == 0


def test_draft_models_and_heads_are_added_up(tmp_path: Path) -> None:
    target = llama_70b()
    draft, head = read_file(write_gguf(tmp_path / "draft.gguf", pad_bytes=2**20)), head_8b()
    sizes: dict[str, Any] = {"context": 1024, "kv_type": "q8_0", "caches": 2}
    prices = [estimate_memory(draft, *sizes.values()), estimate_head(*head, *sizes.values())]
    alone = estimate_memory(target, *sizes.values()).total
    enough = Memory(RESERVE_BYTES + alone + sum(price.total for price in prices))
    both = check_fit(target, [(draft, None), head], memory=enough, **sizes)
    assert both.draft is not None and both.headroom == 0
    assert (both.draft.weights, both.draft.kv, both.draft.compute) == tuple(
        sum(getattr(price, part) for price in prices) for part in ("weights", "kv", "compute")
    )
    with pytest.raises(DoesNotFit):
        check_fit(target, [(draft, None), (draft, None), head], memory=enough, **sizes)
    assert check_fit(target, [], memory=enough, **sizes).draft is None


def test_devices_add_their_own_memory_only_once() -> None:
    card = DeviceMemory("card", 24 * GIB, 24 * GIB)
    shared = DeviceMemory("unified", 24 * GIB, 32 * GIB, shares_ram=True)
    assert Memory(32 * GIB, (card,)).usable == 56 * GIB - 2 * RESERVE_BYTES
    assert Memory(32 * GIB, (shared,)).usable == 32 * GIB - RESERVE_BYTES


def test_a_device_that_has_to_hold_everything() -> None:
    """Apple silicon under MLX: the working set the system recommends, or less where less RAM is free."""
    device = DeviceMemory("M", 8 * GIB, 8 * GIB, shares_ram=True, holds_all=True)
    assert Memory(RESERVE_BYTES + 20 * GIB, (device,)).usable == 8 * GIB
    assert Memory(RESERVE_BYTES + 3 * GIB, (device,)).usable == 3 * GIB


def test_what_mlx_has_taken_of_its_gpu_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = library.Device("M", on_gpu=True, working_set=8 * GIB)
    monkeypatch.setattr(library, "device", lambda: gpu)
    held = library.load_mlx().zeros(2**20)
    library.load_mlx().eval(held)
    (found,) = device_memory("mlx")
    assert found.total == 8 * GIB and found.total - found.free >= held.nbytes == 4 * 2**20


def layered(layers: int, experts: int = 0) -> Header:
    """Layers of 1 GiB of F16, and `experts` GiB more in each, with an output matrix of 1 GiB."""
    gib_of_f16 = (1024, 2**19)
    tensors = [TensorInfo("output.weight", gib_of_f16, GGML_TYPES[1], 0)]
    for i in range(layers):
        tensors.append(TensorInfo(f"blk.{i}.attn_q.weight", gib_of_f16, GGML_TYPES[1], 0))
        if experts:
            shape = (1024, 2**19, experts)
            tensors.append(TensorInfo(f"blk.{i}.ffn_up_exps.weight", shape, GGML_TYPES[1], 0))
    metadata: dict[str, object] = {"general.architecture": "llama", "llama.block_count": layers}
    return Header("layered.gguf", metadata, tuple(tensors), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free_gib", "experts", "placed"),
    [
        ([12], 0, ()),  # 10 layers, the output matrix, and the reserve
        ([11], 0, (10,)),  # nine layers and the output matrix
        ([4.1], 0, (3,)),
        ([1.6], 0, (1,)),  # the output matrix alone
        ([1.2], 0, (0,)),
        ([], 0, ()),  # no device
        ([7, 7], 0, ()),
        ([42], 3, ()),
        ([40], 3, (None, 1)),  # the experts of one layer stay in RAM
        ([15], 3, (None, 9)),
        ([12], 3, (None, 10)),
        ([11], 3, (10, 10)),  # even the rest of a layer has no room
        ([1.6], 3, (1,)),
        ([15, 15], 3, (None, 5, (7, 4))),  # five layers of 1 GiB and two of 4, then three of 4 and the output matrix
        ([4, 4], 3, (7, 10)),
    ],
)
@pytest.mark.parametrize("shares_ram", [False, True])
def test_layers_go_where_there_is_memory(
    free_gib: list[float], experts: int, placed: tuple[Any, ...], shares_ram: bool
) -> None:
    model, free = layered(10, experts), [round(each * GIB) for each in free_gib]
    devices = tuple(DeviceMemory(f"GPU{i}", each, each, shares_ram) for i, each in enumerate(free))
    fit = check_fit(model, [], context=8, memory=Memory(2**40, devices), force=True)
    assert place_layers(model, replace(fit, target=replace(fit.target, kv=0, compute=0))) == Placement(*placed)


def test_a_device_that_shares_ram_takes_no_layers_beside_one_with_memory_of_its_own() -> None:
    integrated, gpu = DeviceMemory("iGPU", 2**40, 2**40, shares_ram=True), DeviceMemory("GPU", 16 * GIB, 16 * GIB)
    for model, devices, placed in (
        (layered(20), (integrated, gpu), Placement(15)),
        (layered(10, 3), (integrated, gpu), Placement(None, 9)),
        (layered(10, 3), (gpu, integrated, gpu), Placement(None, 5, (7, 0, 4))),
    ):
        fit = check_fit(model, [], context=8, memory=Memory(2**40, devices))
        assert place_layers(model, fit) == placed


def test_scores_of_attention_need_room_where_layers_are_divided_unless_flash_attention_is_on() -> None:
    model = replace(layered(10), metadata={**layered(10).metadata, "llama.attention.head_count": 32})
    device = DeviceMemory("GPU", 8 * GIB, 8 * GIB)
    fit = check_fit(model, [], context=65_536, memory=Memory(2**40, (device,)), force=True)
    fit = replace(fit, target=replace(fit.target, kv=0, compute=0))
    assert score_bytes(model, 65_536) == 4 * GIB
    assert [place_layers(model, fit, flash=flash).layers for flash in (False, True)] == [3, 7]


@pytest.mark.parametrize(("architecture", "states"), [("qwen35", 9), ("mamba", 1)])
def test_recurrent_states_count_in_each_cache(architecture: str, states: int) -> None:
    """Sizes of Qwen3.5-27B with three linear layers, of which llama.cpp says 84.16 MiB."""
    sizes = {"state_size": 128, "inner_size": 6144, "conv_kernel": 4, "group_count": 16}
    metadata = {"general.architecture": architecture, **{f"{architecture}.ssm.{key}": n for key, n in sizes.items()}}
    tensors = [
        TensorInfo(f"blk.{i}.{name}.weight", (32, 32), GGML_TYPES[1], 0)
        for i, name in enumerate(["ssm_in", "ssm_in", "attn_q", "ssm_out"])
    ]
    header = Header("hybrid.gguf", metadata, tuple(tensors), 0)  # type: ignore[arg-type]
    found = [estimate_memory(header, 128, caches=caches).states for caches in (1, 4)]
    assert found == [round(84.1640625 * 2**20) * states // 9, round(84.1640625 * 2**20) * states // 9 * 4]
