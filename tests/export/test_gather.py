"""What is exported for files on this machine: paths, original weights, adapted drafts, figures that were measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.store import ProfileStore, current_setting
from edgespec.backends.options import LoadOptions
from edgespec.errors import InvalidRequest, UnknownModel
from edgespec.export.engines import ENGINES, export
from edgespec.export.measured import read_measured
from edgespec.export.plan import ExportPlan
from edgespec.export.remarks import list_remarks
from edgespec.formats.gguf import read_header
from edgespec.models.references import LocalPath
from edgespec.models.versions import AdaptedDrafts
from tests.export.conftest import Gather
from tests.formats.test_gguf import Bytes
from tests.gguf_models import DRAFT, REPOSITORY, TARGET, GgufBuilder
from tests.mlx_models import DENSE, make_folder
from tests.models.test_versions import CARD

FIXTURES = REPOSITORY / "tests" / "fixtures"
IDS = {"target_id": "a/target", "draft_id": "a/draft"}
PROFILE = Profile({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0, 16: 4.0}, {"model": DraftCost({1: 0.1})})


def words_for(name: str, plan: ExportPlan) -> str:
    _, exported = export(plan, ENGINES[name])
    return " ".join([*exported.commands[0], *exported.files.values()])


def remarks_for(name: str, plan: ExportPlan) -> str:
    choice, exported = export(plan, ENGINES[name])
    return "\n".join(list_remarks(plan, ENGINES[name], choice, exported))


def a_model(path: Path, **metadata: str) -> Path:
    """A GGUF file with these keys of `general`."""
    path.parent.mkdir(exist_ok=True)
    builder = GgufBuilder(path, "llama", layers=1, width=64)
    for key, text in metadata.items():
        builder.writer.add_string(f"general.{key}", text)
    builder.attention(heads=4, kv_heads=2, head_width=16)
    builder.embeddings(64)
    builder.save()
    return path


def test_the_embedded_pair_has_no_original(plan: Gather) -> None:
    embedded = plan(None)
    assert f"--model {TARGET} --spec-draft-model {DRAFT}" in words_for("llama-server", embedded)
    assert embedded.target.is_quantized and embedded.target.original is None
    with pytest.raises(InvalidRequest, match="it is not known which weights python-6m was made from"):
        export(embedded, ENGINES["vllm"])
    said = remarks_for("vllm", plan(None, **IDS))
    assert "a/draft (model; named by you)" in said and "22% to 72%" in said, "the registry's acceptance"


def test_a_file_says_where_it_comes_from(plan: Gather, tmp_path: Path) -> None:
    key = {"source.repo_url": "https://huggingface.co/a/b"}
    path = a_model(tmp_path / "a folder" / "m.gguf", **key)
    found = plan(str(path))
    assert (found.target.original, found.target.known_from) == ("a/b", "general.source.repo_url")
    assert found.target.files == LocalPath(path) and words_for("vllm", found).startswith("vllm serve a/b ")
    assert plan(str(path), target_id="c/d").target.original == "c/d"
    folder = make_folder(tmp_path / "originals", DENSE)
    assert plan(str(path), target_id=str(folder)).target.original == str(folder)
    for wrong in ("c", "c/d:Q4_0", str(tmp_path / "none"), ""):
        with pytest.raises(InvalidRequest, match="neither a repository nor a folder"):
            plan(str(path), target_id=wrong)


@pytest.mark.parametrize(
    ("name", "method", "engines"),
    [
        ("eagle3-python-6m", "eagle3", {"vllm": "eagle3", "sglang": "EAGLE3", "tensorrt-llm": "Eagle3"}),
        ("eagle-python-6m", "eagle", {"vllm": "eagle", "sglang": "EAGLE"}),
        ("dflash-python-6m", "dflash", {"vllm": "dflash", "sglang": "DFLASH", "tensorrt-llm": "DFlash"}),
        ("dspark-python-6m", "dspark", {"vllm": "dspark", "sglang": "DSPARK", "tensorrt-llm": "DSpark"}),
        ("mtp-python-6m", "mtp", {"vllm": "mtp", "sglang": "NEXTN", "tensorrt-llm": "MTP"}),
        ("hydra-python-6m", "hydra", {}),
    ],
)
def test_trained_heads(name: str, method: str, engines: dict[str, str], plan: Gather) -> None:
    """A head in half precision is exported as it is, whatever the target's own files are."""
    folder = FIXTURES / "heads" / name
    found = plan(None, str(folder), "mlx", "a/target")
    (draft,) = found.drafts
    assert draft.method == method and draft.weights is not None and draft.weights.original == str(folder)
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        if engine in engines:
            assert engines[engine] in words_for(engine, found) and str(folder) in words_for(engine, found)
        else:
            with pytest.raises(InvalidRequest, match=f"no drafter of the kind {method}"):
                export(found, ENGINES[engine])
    if method == "dflash":
        stated = json.loads((folder / "config.json").read_text())["block_size"]
        assert draft.block == stated - 1 == export(found, ENGINES["vllm"])[0].length


def test_a_pard_model(plan: Gather) -> None:
    found = plan(None, f"pard:{FIXTURES / 'pard'}", "mlx", "a/target")
    assert '"parallel_drafting": true' in words_for("vllm", found) and str(FIXTURES / "pard") in words_for(
        "vllm", found
    )
    assert "PARD" in words_for("tensorrt-llm", found)


def test_an_adapted_draft_is_taken_where_it_can_be(plan: Gather, tmp_path: Path) -> None:
    card = AdaptedDrafts(tmp_path / "adapted").pair(TARGET, DRAFT).add(CARD, lambda path: shutil.copy(DRAFT, path))
    version = next((tmp_path / "adapted").rglob("draft.gguf"))
    assert f"--spec-draft-model {version}" in words_for("llama-server", plan(None))
    said = remarks_for("vllm", plan(None, **IDS))
    assert f"version {card.version}, adapted on this machine; vLLM 0.33 cannot load it" in said


def test_an_adapted_folder_is_loaded_by_others(plan: Gather, tmp_path: Path) -> None:
    target, draft = (make_folder(tmp_path / name, DENSE, seed=seed) for seed, name in enumerate(("target", "draft")))
    pair = AdaptedDrafts(tmp_path / "adapted").pair(target, draft)
    assert f'"model": "{draft}"' in words_for("vllm", plan(str(target), str(draft), "mlx"))
    pair.add(CARD, lambda path: shutil.copytree(draft, path))
    version = pair.folder / "1" / "draft"
    for name in ("vllm", "mlx-lm"):
        assert str(version) in words_for(name, plan(str(target), str(draft), "mlx"))
    assert "cannot load it" not in remarks_for("vllm", plan(str(target), str(draft), "mlx"))


def test_a_quantized_folder_is_not_its_own_original(plan: Gather, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", DENSE, bits=4)
    found = plan(str(folder), "none", "mlx")
    assert found.target.original is None and found.target.is_quantized
    (folder / "README.md").write_text("---\nbase_model: a/b\n---\n")
    assert plan(str(folder), "none", "mlx").target.original == "a/b"
    assert "AWQ, GPTQ or NVFP4 instead, or add --quantization fp8" in remarks_for(
        "vllm", plan(str(folder), "none", "mlx")
    )


def test_what_is_known_of_the_weights(plan: Gather, tmp_path: Path) -> None:
    """Rows of the embedding, which engines compare; weights that were released in few bits get no advice."""
    data = TARGET.read_bytes()
    tokens = read_header(Bytes(data, len(data)), TARGET.name).metadata["tokenizer.ggml.tokens"]
    found = plan(None)
    assert isinstance(tokens, list) and found.drafts[0].weights is not None
    assert found.target.vocab_size == found.drafts[0].weights.vocab_size == len(tokens)
    folder = make_folder(tmp_path / "m", DENSE)
    assert (
        plan(str(folder), "none", "mlx").target.vocab_size
        == json.loads((folder / "config.json").read_text())["vocab_size"]
    )
    for backend in ("llamacpp", "mlx"):
        assert "weights in use are quantized" not in remarks_for("vllm", plan("gpt-oss-20b", backend=backend))
    assert "weights in use are quantized" in remarks_for("vllm", plan("qwen3-32b-q4"))


def store(change: Callable[[DraftStats], None]) -> None:
    stats = DraftStats(PROFILE)
    change(stats)
    ProfileStore(TARGET, [DRAFT]).save(current_setting("llamacpp", LoadOptions(threads=1)), stats)


def test_the_acceptance_that_was_measured(plan: Gather) -> None:
    def learn(stats: DraftStats) -> None:
        stats.drafter("model; sample at 0.0, answer", "probability").first_choice.restore((24.0, 30.0))
        stats.drafter("model; block at 0.7, answer", "probability").first_choice.restore((2.0, 20.0))

    store(learn)
    found = plan(None)
    said = remarks_for("llama-server", found)
    assert "4 tokens, a usual number." in said and "--spec-draft-n-max 4" in words_for("llama-server", found)
    assert f"({found.machine}; sample at 0.0, answer): 80% of the tokens" in said
    assert "22% to 72%" not in said, "the registry's figure is of another machine"
    assert "not for the original weights" in remarks_for("vllm", plan(None, **IDS))


def test_figures_of_another_processor_are_left_out(plan: Gather) -> None:
    stats = DraftStats(PROFILE)
    stats.drafter("model; x", "probability").first_choice.restore((24.0, 30.0))
    key = {**current_setting("llamacpp", LoadOptions(threads=1)), "processor": "another"}
    ProfileStore(TARGET, [DRAFT]).save(key, stats)
    assert "measured here" not in remarks_for("llama-server", plan(None))


def test_a_link_keeps_its_name(plan: Gather, tmp_path: Path) -> None:
    """Files of the hub's cache are links, and the names of a split model's parts count."""
    for name in ("blobs", "snapshot"):
        (tmp_path / name).mkdir()
    shutil.copy(TARGET, tmp_path / "blobs" / "0123")
    link = tmp_path / "snapshot" / "m.gguf"
    link.symlink_to("../blobs/0123")
    _, exported = export(plan(str(link), "none"), ENGINES["llama-server"])
    assert exported.commands[0] == ("llama-server", "--model", str(link))


def test_too_little_evidence_is_no_figure(plan: Gather) -> None:
    store(lambda stats: stats.drafter("model; x", "probability").first_choice.restore((2.0, 3.0)))
    assert "measured here" not in remarks_for("llama-server", plan(None))
    assert read_measured(DraftStats(PROFILE), "model") is None


def test_pairs_that_are_not_here(plan: Gather) -> None:
    found = plan("qwen3.5-9b-q4")
    assert [draft.method for draft in found.drafts] == ["mtp", "ngram"] and found.drafts[0].weights is None
    assert [draft.method for draft in plan("qwen3-32b-q4", backend="mlx").drafts] == [
        "eagle3",
        "pard",
        "model",
        "ngram",
    ]
    gemma = plan("gemma-4-31b-q4", "mtp")
    assert gemma.drafts[0].weights is not None and gemma.drafts[0].weights.original == "google/gemma-4-31B-it-assistant"
    (named,) = plan("llama-8b-q4", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0").drafts
    assert named.weights is not None and named.weights.original == "meta-llama/Llama-3.2-1B-Instruct"
    (alias,) = plan("llama-70b-q4", "llama-8b-q4").drafts
    assert alias.weights is not None and alias.weights.original == "meta-llama/Llama-3.1-8B-Instruct"
    assert plan("llama-70b-q4", "none").drafts == ()
    for draft in ("mtp", "pard", "eagle3"):
        with pytest.raises(UnknownModel, match=f"pairs no {draft} with this target"):
            plan("llama-8b-q4", draft)
