"""Which trained head is taken for a target: the registry's, its own, one beside it; headers alone are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.backends import FileBackend
from edgespec.backends.options import LoadOptions
from edgespec.errors import DraftRefused, InvalidModelFile
from edgespec.models.draft_finder import MAX_LOOKS
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan, plan
from edgespec.models.registry import load_registry
from edgespec.models.report import describe_plan
from tests.formats.ggufs import write_gguf
from tests.formats.head_files import H, V, eagle3_shapes, write, write_eagle3, write_folder, write_mtp
from tests.reporter import Heard

Planned = Callable[..., Plan]


def write_target(path: Path, *, size: int = H) -> Path:
    return write(path, "llama", {"embedding_length": size}, {"token_embd.weight": (V, size)})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target.gguf")


@pytest.fixture
def planned(tmp_path: Path, heard: Heard) -> Planned:
    def plan_it(
        model: Path | str,
        draft: str = "auto",
        *,
        toml: str = "",
        backend: FileBackend = "llamacpp",
        fetch: bool = False,
    ) -> Plan:
        (tmp_path / "models.toml").write_text(toml, encoding="utf-8")
        options = LoadOptions(threads=1, context_size=128)
        request = LoadConfig(str(model), backend, draft, load=options, fetch_heads=fetch)
        hub = Hub("https://nowhere.invalid", tmp_path / "hub", offline=True)
        return plan(request, load_registry(tmp_path / "models.toml"), hub)

    return plan_it


def taken(found: Plan) -> list[tuple[str, str]]:
    return [(each.spec.name, Path(each.label).name) for each in found.drafters]


def test_a_head_beside_the_target(target: Path, planned: Planned, heard: Heard) -> None:
    assert taken(planned(target)) == [("ngram", "ngram")] and heard.notices == []
    with pytest.raises(DraftRefused, match="no eagle3 head in the target's file, beside it or in the registry"):
        planned(target, "eagle3")
    head = write_eagle3(target.with_name("head.gguf"))
    write_gguf(target.with_name("another-model.gguf"))
    target.with_name("damaged.gguf").write_bytes(b"GGUF")
    found = planned(target)
    assert taken(found) == [("ngram", "ngram"), ("eagle3", "head.gguf")] and not found.options.mtp
    assert found.findings == [f"Drafting with {head}, an EAGLE-3 head that lies beside the target."]
    named = planned(target, "eagle3")
    assert taken(named) == [("eagle3", "head.gguf")] and named.findings == []
    assert taken(planned(target, "ngram")) == [("ngram", "ngram")] and heard.notices == []


def test_one_notice_for_heads_that_do_not_fit(tmp_path: Path, planned: Planned, heard: Heard) -> None:
    target = write_target(tmp_path / "target.gguf", size=16)
    head, other = write_eagle3(tmp_path / "head.gguf"), write_eagle3(tmp_path / "other.gguf")
    assert taken(planned(target)) == [("ngram", "ngram")]
    told = "is an EAGLE-3 head for a hidden size of 8; the target has 16"
    assert heard.notices == [f"Drafting without a head: {head} {told}; {other} {told}."]
    with pytest.raises(DraftRefused, match="for a hidden size of 8; the target has 16"):
        planned(target, "eagle3")
    target = write_target(tmp_path / "target.gguf")
    target.write_bytes(target.read_bytes().replace(b"token77", b"tokeN77"))
    planned(target)
    assert "token 77 is 'tokeN77' in the target and 'token77' in the draft" in heard.notices[1]


def test_the_targets_own_head(tmp_path: Path, planned: Planned, heard: Heard) -> None:
    target = write_mtp(tmp_path / "target.gguf", trunk=True)
    write_eagle3(tmp_path / "head.gguf")
    found = planned(target)
    own = found.drafters[-1]
    assert taken(found) == [("ngram", "ngram"), ("mtp", "mtp")] and own.head is not None and own.head.in_target
    assert own.model is not None and own.model.source == found.target and found.options.mtp
    assert found.findings == ["Drafting with an MTP head in the target's own file."] and heard.notices == []
    named = planned(target, "mtp")
    assert taken(named) == [("mtp", "mtp")] and named.options.mtp
    other = planned(target, "eagle3")
    assert taken(other) == [("eagle3", "head.gguf")] and not other.options.mtp
    facts = describe_plan(found).to_dict()
    assert facts["draft"] == "ngram+mtp" and facts["draft_models"] == []
    (head,) = facts["heads"]
    assert (head["head"], head["kind"], head["in_target"], head["weights_bytes"]) == ("mtp", "mtp", True, 0)


def test_the_registrys_head_comes_first(target: Path, planned: Planned, heard: Heard) -> None:
    write_eagle3(target.with_name("beside.gguf"))
    (elsewhere := target.parent / "elsewhere").mkdir()
    head = write_eagle3(elsewhere / "paired.gguf")
    toml = f'[here.gguf]\ntarget = "{target}"\nhead = "{head}"\nhead_kind = "eagle3"\n'
    found = planned("here", toml=toml)
    assert taken(found) == [("ngram", "ngram"), ("eagle3", "paired.gguf")] and heard.notices == []
    assert found.findings == [f"Drafting with {head}, an EAGLE-3 head that the registry pairs with the target."]
    assert taken(planned("here", "eagle3", toml=toml)) == [("eagle3", "paired.gguf")]
    head.write_bytes(head.read_bytes()[:-40])
    assert taken(planned("here", toml=toml)) == [("ngram", "ngram"), ("eagle3", "beside.gguf")], "the next one"


def test_a_head_that_is_not_downloaded_is_left(target: Path, planned: Planned, heard: Heard) -> None:
    toml = f'[here.gguf]\ntarget = "{target}"\nhead = "user/head-GGUF"\nhead_kind = "eagle3"\n'
    assert taken(planned("here", toml=toml)) == [("ngram", "ngram")]
    assert heard.notices == [
        "Drafting without a head: user/head-GGUF, an EAGLE-3 head for this target, is not downloaded; "
        "`edgespec pull here` does that."
    ]
    planned("here", toml=toml, fetch=True)
    assert "offline" in heard.notices[1].lower(), "a pull asks the hub"
    toml = f'[here.gguf]\ntarget = "{target}"\nhead = "user/heads"\nhead_kind = "medusa"\n'
    assert taken(planned("here", toml=toml)) == [("ngram", "ngram")] and len(heard.notices) == 2
    planned("here", toml=toml, fetch=True)
    told = "Drafting without a head: user/heads is a set of Medusa heads, which edgespec does not run on llamacpp"
    assert heard.notices[2].startswith(told)


def test_a_file_that_was_made_without_its_head(target: Path, planned: Planned, heard: Heard) -> None:
    toml = f'[here.gguf]\ntarget = "{target}"\nwith_head = "unsloth/Qwen3.5-9B-MTP-GGUF"\n'
    assert taken(planned("here", toml=toml)) == [("ngram", "ngram")]
    told = "the target's file was made without the model's MTP head; unsloth/Qwen3.5-9B-MTP-GGUF has it."
    assert heard.notices == [f"Drafting without a head: {told}"]
    with pytest.raises(DraftRefused) as refused:
        planned("here", "mtp", toml=toml)
    assert refused.value.message == told and refused.value.hint == "Use --model unsloth/Qwen3.5-9B-MTP-GGUF."
    write_eagle3(target.with_name("head.gguf"))
    assert taken(planned("here", toml=toml))[1:] == [("eagle3", "head.gguf")]


def test_a_head_alone_is_no_target(tmp_path: Path, planned: Planned) -> None:
    with pytest.raises(InvalidModelFile, match="is an MTP head; it drafts for a model"):
        planned(write_mtp(tmp_path / "mtp.gguf", trunk=False))


def test_folders_beside_a_folder(tmp_path: Path, planned: Planned, heard: Heard) -> None:
    config = {"model_type": "llama", "hidden_size": H, "vocab_size": V, "num_hidden_layers": 4}
    target = write_folder(tmp_path / "models" / "target", config, {"model.layers.0.a.weight": (H, H)})
    (target / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    states = {"model_type": "llama", "hidden_size": H, "vocab_size": V, "draft_vocab_size": 32}
    head = write_folder(tmp_path / "models" / "head", states, eagle3_shapes())
    found = planned(target, backend="mlx")
    assert taken(found) == [("ngram", "ngram"), ("eagle3", "head")]
    assert found.findings == [f"Drafting with {head}, an EAGLE-3 head that lies beside the target."]
    facts = describe_plan(found).to_dict()["heads"][0]
    assert facts["kv_bytes"] > 128 * H * 2, "a state of each position besides keys and values"
    write_folder(head, states | {"vocab_size": V + 1}, {})
    assert taken(planned(target, backend="mlx")) == [("ngram", "ngram")]
    assert "is an EAGLE-3 head for a vocabulary of 301; the target has 300" in heard.notices[0]


def test_a_folder_with_many_models_is_not_searched_without_end(target: Path, planned: Planned, heard: Heard) -> None:
    for i in range(MAX_LOOKS):
        target.with_name(f"a{i:03}.gguf").write_bytes(b"GGUF")
    write_eagle3(target.with_name("head.gguf"))
    assert taken(planned(target)) == [("ngram", "ngram")] and heard.notices == []
    target.with_name("a000.gguf").unlink()
    assert taken(planned(target))[1:] == [("eagle3", "head.gguf")]


@pytest.mark.parametrize("backend", ["llamacpp", "mlx"])
def test_a_head_in_the_format_of_the_other_runtime(
    tmp_path: Path, planned: Planned, target: Path, backend: FileBackend
) -> None:
    config = {"model_type": "llama", "hidden_size": H, "draft_vocab_size": 32}
    if backend == "llamacpp":
        head = write_folder(tmp_path / "head", config, eagle3_shapes())
    else:
        head = write_eagle3(tmp_path / "head.gguf")
    with pytest.raises(InvalidModelFile, match="is a trained head, and no model") as refused:
        planned("python-6m", f"eagle3:{head}", backend=backend)
    for told in ("convert_hf_to_gguf.py", "Medusa, Hydra and EAGLE-1 and 2 run on MLX alone"):
        assert told in refused.value.hint
