"""Model folders that cannot be opened: one sentence that names the cause, and the process lives on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends import FileBackend
from edgespec.backends.mlx.model import load
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.errors import BackendError, Cancelled, InvalidModelFile
from edgespec.models.hub import Hub
from edgespec.models.references import LocalPath
from edgespec.models.resolve import read_metadata, resolve_source
from edgespec.progress import loading, reporting
from tests.contract.runtimes import prefill
from tests.mlx_models import DENSE, make_folder
from tests.reporter import Heard


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("mlx") / "whole", DENSE)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def load_error(folder: Path) -> str:
    with pytest.raises(InvalidModelFile) as caught:
        load(folder, LoadOptions(context_size=64))
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in load_error(folder).replace("model*", "model")


def test_a_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "holds no tokenizer" in load_error(folder)


def test_an_id_that_no_vocabulary_has(folder: Path) -> None:
    """Memory would be allocated up to it."""
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"][next(iter(described["model"]["vocab"]))] = 2**31 - 1
    file.write_text(json.dumps(described))
    assert "tokenizer.json has the id 2147483647" in load_error(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"hidden_size": 3}', "\udcff"])
def test_damaged_configs(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert "config.json" in load_error(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "../llama"}, "not supported"),
        ({"model_type": "olmo"}, "cannot open"),  # mlx-lm ends the process here
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"num_hidden_layers": "two"}, "cannot open"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization": {"group_size": 64, "bits": 4}}, None),  # nothing is quantized, so it opens
        ({"model_file": "own.py"}, "custom module"),
        ({"rope_scaling": {"type": "nonesuch"}}, "nonesuch"),
    ],
)
def test_configs_that_do_not_fit(folder: Path, changes: dict[str, Any], message: str | None) -> None:
    (folder / "own.py").write_text("raise SystemExit('this must never run')\n")
    change(folder, **changes)
    if message is None:
        load(folder, LoadOptions(context_size=64)).close()
    else:
        assert message in load_error(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -5000])
def test_truncated_weights(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    told = load_error(folder)
    assert "model.safetensors is damaged" in told or "model.safetensors is cut short" in told


def test_weights_with_a_damaged_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(raw[:8], "little")
    opened = 0
    for _ in range(40):
        flipped = bytearray(raw)
        flipped[int(rng.integers(0, header))] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(flipped)
        try:
            load(folder, LoadOptions(context_size=64)).close()
            opened += 1  # a bit of the metadata that nobody reads
        except InvalidModelFile as error:
            assert error.hint
    assert opened < 20


def test_a_shard_that_the_index_names_is_missing(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in load_error(folder)


def test_an_index_that_is_left_over_from_other_weights(folder: Path) -> None:
    """As in repositories that were quantized again; mlx-lm reads no index."""
    shards = {"lm_head.weight": "model-00001-of-00002.safetensors", "vision": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    load(folder, LoadOptions(context_size=64)).close()
    (folder / "model.safetensors").unlink()
    assert "holds no model" in load_error(folder)


@pytest.mark.parametrize(
    ("weights", "config", "told"),
    [
        ("adapters.safetensors", {"model": "me/base"}, "model 'me/base' with mlx_lm.fuse"),
        ("adapter_model.safetensors", {"base_model_name_or_path": "me/base"}, "'me/base' with PEFT's"),
        ("other.safetensors", {"model": ["me/base"]}, "its base model with the program"),
    ],
)
@pytest.mark.parametrize("backend", ["llamacpp", "mlx"])
def test_a_lora_adapter(folder: Path, weights: str, config: dict[str, Any], told: str, backend: FileBackend) -> None:
    (folder / "model.safetensors").rename(folder / weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModelFile, match=r"is a LoRA adapter") as caught:
        read_metadata(resolve_source(LocalPath(folder), backend, Hub.from_environment()), Hub.from_environment())
    assert told in (caught.value.hint or "")


@pytest.mark.parametrize("index", ['{"weight_map": {"a": ["x"]}}', '{"weight_map": 3}', "[]"])
def test_a_damaged_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    if index != "[]":  # it names no file that is here, as one that is left over
        load(folder, LoadOptions(context_size=64)).close()
    else:
        assert "index" in load_error(folder)


def test_weights_that_are_no_numbers(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = mx.full(weights["model.norm.weight"].shape, float("nan"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        load(folder, LoadOptions(context_size=64))


def test_a_damaged_chat_template(folder: Path) -> None:
    (folder / "chat_template.json").write_text("{")
    assert "chat_template.json" in load_error(folder)


def test_cancelling_while_weights_are_read(folder: Path) -> None:
    def check() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cancellable(check):
        load(folder, LoadOptions(context_size=64))


def test_progress_reaches_the_end(folder: Path) -> None:
    heard = Heard()
    with reporting(heard), loading("it"):
        model = load(folder, LoadOptions(context_size=64))
    seen = heard.fractions
    assert seen == sorted(seen) and seen[-1] == 1.0
    assert np.isfinite(prefill(model.open_session(), [1, 2])).all()
    model.close()
    with pytest.raises(BackendError, match="closed"):
        model.open_session()


def test_a_cache_type_that_the_head_size_does_not_allow(tmp_path: Path) -> None:
    narrow = make_folder(tmp_path / "n", {**DENSE, "head_dim": 16})
    load(narrow, LoadOptions(context_size=64)).close()
    with pytest.raises(BackendError, match=r"MLX cannot run this model.*group") as caught:
        load(narrow, LoadOptions(context_size=64, kv_type="q8_0"))
    assert "--kv-type" in str(caught.value.hint)
