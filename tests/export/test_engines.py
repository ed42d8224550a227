"""Every pair of the registry for every engine, against the options that the engines' own sources name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from edgespec.backends import FileBackend
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.export.engine import MODELFILE, Choice, Engine
from edgespec.export.engines import ENGINES, export
from edgespec.export.plan import Draft, Exported, ExportPlan, Weights
from edgespec.export.remarks import list_remarks
from edgespec.formats.heads import HeadKind
from edgespec.models.references import HubQuant, HubRepo, LocalPath, PackagedFile
from edgespec.models.registry import Registry
from tests.export.conftest import Gather, read_keys
from tests.export.test_script import check_syntax

LOSSY = re.compile(r"fly|synthetic|relaxed|posterior|accept.threshold|typical|heterogeneous")
METHODS = ("model", "pard", "ngram", "suffix", "self", "recycling", *get_args(HeadKind))


def a_plan(*methods: str, folder: str = "", is_auto: bool = True, **of_draft: Any) -> ExportPlan:
    """A plan with a target and drafts of these methods, whose weights lie in `folder` or on the hub."""

    def weights(name: str) -> Weights:
        files = LocalPath(Path(folder, name)) if folder else HubRepo(f"u/{name}")
        return Weights(files, files, str(files), "the test", is_quantized=True)

    drafts = [
        Draft(each, None if each in ("ngram", "suffix", "self") else weights(each), **of_draft) for each in methods
    ]
    return ExportPlan("the-model", "mlx", weights("target"), tuple(drafts), is_auto, "a processor")


def list_exports(registry: Registry, plan: Gather) -> Iterator[tuple[str, Engine, Exported]]:
    """(engine, itself, result) for both runtimes' pairs of every entry."""
    for name, entry in registry.entries.items():
        for backend in get_args(FileBackend):
            pair = entry.pair(backend)
            if pair is None:
                with pytest.raises(EdgespecError, match="names no"):
                    plan(name, backend=backend)
                continue
            ids = {"target_id": "a/b", "draft_id": "c/d"} if name == "python-6m" else {}
            gathered = plan(name, backend=backend, **ids)
            for engine_name, engine in ENGINES.items():
                if engine.backend not in (None, backend):
                    continue
                if engine_name == "mlx-lm" and isinstance(pair.target, PackagedFile):
                    with pytest.raises(InvalidRequest, match="mlx-lm loads folders"):
                        export(gathered, engine)
                    continue
                choice, exported = export(gathered, engine)
                remarks = list(list_remarks(gathered, engine, choice, exported))
                assert all(line and line[-1] == "." for line in remarks), remarks
                yield engine_name, engine, exported


def test_every_entry_for_every_engine(registry: Registry, plan: Gather, tmp_path: Path) -> None:
    found = set()
    for name, _, exported in list_exports(registry, plan):
        found.add(name)
        check_syntax(exported, tmp_path)
        check_keys(name, exported)
    assert found == set(ENGINES)


@pytest.mark.parametrize("name", ["llama-server", "mlx-lm", "ollama"])
def test_a_revision_is_left_out_for_engines_that_take_none(name: str) -> None:
    files = HubRepo("u/target", "v2") if name == "mlx-lm" else HubQuant("u/target", "Q8_0", "v2")
    _, exported = export(replace(a_plan(), target=Weights(files, files)), ENGINES[name])
    text = " ".join([*exported.commands[0], *exported.files.values()])
    assert "u/target" in text and "v2" not in text
    assert f"{ENGINES[name].title} takes no revision, and loads what u/target has today." in exported.remarks


def check_keys(name: str, exported: Exported) -> None:
    words = exported.commands[-1]
    assert not LOSSY.search(" ".join([*words, *exported.files.values()]))
    if name == "vllm":
        check_vllm(words)
    elif name == "sglang":
        check_sglang(words)
    elif name == "llama-server":
        keys = read_keys(name)
        assert {word for word in words if word.startswith("-")} <= set(keys["options"])
        if "--spec-type" in words:
            assert set(words[words.index("--spec-type") + 1].split(",")) <= set(keys["methods"]) - {"none"}
    elif name == "ollama":
        check_modelfile(exported.files[MODELFILE])
    elif name == "tensorrt-llm":
        for text in exported.files.values():
            check_tensorrt(yaml.safe_load(text)["speculative_config"])


def check_vllm(words: tuple[str, ...]) -> None:
    keys = read_keys("vllm")
    assert words[:2] == ("vllm", "serve") and len(words) in (3, 5)
    if len(words) == 5:
        assert words[3] == "--speculative-config"
        config = json.loads(words[4])
        assert config["method"] in keys["methods"] and config["num_speculative_tokens"] > 0
        kinds = {"int": int, "str | None": str, "int | None": int, "bool": bool}
        for key, value in config.items():
            kind = keys["options"][key]
            assert kind == "SpeculativeMethod | None" or isinstance(value, kinds[kind]), key


def check_sglang(words: tuple[str, ...]) -> None:
    keys = read_keys("sglang")
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options.pop("--model-path") and options.keys() <= keys["options"].keys()
    if options:
        assert options["--speculative-algorithm"] in keys["methods"]
    for option, value in options.items():
        assert "int" not in keys["options"][option] or int(value) > 0, option


def check_tensorrt(config: dict[str, Any]) -> None:
    keys = read_keys("tensorrt-llm")
    own = keys["options"][config.pop("decoding_type")]
    assert config.keys() <= {*keys["base"], *own} and config["max_draft_len"] > 0


def check_modelfile(text: str) -> None:
    """Ollama's grammar: an instruction, a space, and the rest of the line."""
    lines = [line.partition(" ") for line in text.splitlines()]
    assert [name for name, _, _ in lines].count("FROM") == 1 and lines[0][0] == "FROM"
    for name, _, value in lines:
        assert name in ("FROM", "DRAFT", "PARAMETER") and value and value == value.strip() and not value.startswith('"')
    parameters = [value.split() for name, _, value in lines if name == "PARAMETER"]
    assert all(key == "draft_num_predict" and int(number) > 0 for key, number in parameters)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_alone(name: str, method: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    for folder in ("", '/a folder/it\'s "$here"'):
        plan = a_plan(method, folder=folder, is_auto=False)
        if method not in engine.methods or (name == "ollama" and not folder):
            with pytest.raises(InvalidRequest, match="cannot be exported: "):
                export(plan, engine)
            continue
        choice, exported = export(plan, engine)
        assert choice.draft == plan.drafts[0]
        check_keys(name, exported)
        check_syntax(exported, tmp_path)


def test_the_keys_are_those_of_an_installed_vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm.config import SpeculativeConfig

    assert set(read_keys("vllm")["options"]) == set(SpeculativeConfig.__dataclass_fields__)


def test_an_engine_that_takes_several_drafters_gets_the_lookups() -> None:
    plan = a_plan("model", "ngram", "suffix")
    choice, exported = export(plan, ENGINES["llama-server"])
    assert "ngram-simple,ngram-mod,draft-simple" in exported.commands[0] and not choice.refusals
    choice, _ = export(plan, ENGINES["vllm"])
    assert choice.draft == plan.drafts[0] and set(choice.refusals) == {"ngram", "suffix"}


def test_a_head_in_the_targets_files_needs_no_second_model() -> None:
    weights = Weights(HubRepo("u/t"), HubRepo("u/t"), "o/t", "the test")
    for own in (None, weights):
        plan = ExportPlan("m", "mlx", weights, (Draft("mtp", own),), True, "p")
        for name in ("vllm", "sglang", "tensorrt-llm"):
            _, exported = export(plan, ENGINES[name])
            assert "o/t" not in " ".join([*exported.commands[0]]).replace("o/t", "", 1) + "".join(
                exported.files.values()
            )


def test_fewer_bits_of_the_target_are_no_draft_elsewhere() -> None:
    target, low = (Weights(LocalPath(Path(f)), LocalPath(Path(f)), "o/t", "x") for f in ("/q8.gguf", "/q2.gguf"))
    plan = ExportPlan("m", "llamacpp", target, (Draft("model", low), Draft("ngram")), True, "p")
    choice, _ = export(plan, ENGINES["vllm"])
    assert choice.draft == plan.drafts[1] and "the target's own weights" in choice.refusals["/q2.gguf (model)"]
    assert "/q2.gguf" in export(plan, ENGINES["llama-server"])[1].commands[0]


def test_a_block_has_the_length_that_it_was_trained_for() -> None:
    for block, length in ((8, 8), (None, 15)):
        choice, _ = export(a_plan("dflash", block=block), ENGINES["sglang"])
        assert choice.length == length


def test_dspark_drafts_its_whole_block() -> None:
    """vLLM refuses fewer tokens, because its drafts of them are wrong."""
    plan = a_plan("dspark", block=5)
    for name in ("vllm", "sglang", "llama-server"):
        choice, exported = export(plan, ENGINES[name])
        said = " ".join(list_remarks(plan, ENGINES[name], choice, exported))
        assert choice.length == 5 and "5 tokens, those of its block." in said
        assert "Under load shorter" not in said


@pytest.mark.parametrize(("name", "method"), [("vllm", "model"), ("vllm", "pard"), ("sglang", "model")])
def test_engines_that_compare_the_sizes_of_vocabularies(name: str, method: str) -> None:
    """The embeddings of a family are padded by size: those of Qwen2.5 72B and 0.5B have other numbers of rows."""
    base = a_plan(method, "ngram")
    (draft, lookups), engine = base.drafts, ENGINES[name]
    assert draft.weights is not None

    def of_sizes(ours: int | None, theirs: int | None) -> ExportPlan:
        weights = replace(draft.weights, vocab_size=theirs)
        return replace(
            base, target=replace(base.target, vocab_size=ours), drafts=(replace(draft, weights=weights), lookups)
        )

    for sizes in ((152_064, 151_936), (152_064, 152_064), (None, 151_936), (None, None)):
        plan = of_sizes(*sizes)
        choice, exported = export(plan, engine)
        said = " ".join(list_remarks(plan, engine, choice, exported))
        differ = None not in sizes and sizes[0] != sizes[1]
        assert (choice.draft == lookups) == differ == ("its vocab_size is 151936, the target's 152064" in said)
        assert ("refuses to start if vocab_size" in said) == (None in sizes)
    for other in ("llama-server", "tensorrt-llm") if method == "model" else ():
        assert export(of_sizes(2, 1), ENGINES[other])[0].draft != lookups


def test_a_modelfile_holds_no_line_break() -> None:
    path = LocalPath(Path("/a\nEDGESPEC_END\nrm x/m.gguf"))
    plan = ExportPlan("m", "llamacpp", Weights(path, path), (), True, "p")
    with pytest.raises(InvalidRequest, match="line break"):
        export(plan, ENGINES["ollama"])


def test_lookups_of_llama_server_have_lengths_of_its_own() -> None:
    plan = a_plan("ngram")
    choice, exported = export(plan, ENGINES["llama-server"])
    assert choice.length is None and "--spec-draft-n-max" not in exported.commands[0]
    assert "of lengths that llama-server finds" in " ".join(
        list_remarks(plan, ENGINES["llama-server"], choice, exported)
    )


def test_unknown_originals_are_asked_for() -> None:
    local = LocalPath(Path("/m.gguf"))
    plan = ExportPlan("m", "llamacpp", Weights(local, local), (), True, "p")
    with pytest.raises(InvalidRequest, match="it is not known which weights m was made from") as caught:
        export(plan, ENGINES["vllm"])
    assert "--target-id" in caught.value.hint
    assert export(plan, ENGINES["llama-server"])[1].commands == (("llama-server", "--model", "/m.gguf"),)
    known = Weights(local, local, "a/b", "you")
    drafts = (Draft("model", Weights(local, local)), Draft("ngram"))
    choice, _ = export(ExportPlan("m", "llamacpp", known, drafts, True, "p"), ENGINES["vllm"])
    assert choice.draft == drafts[1] and "--draft-id" in choice.refusals["/m.gguf (model)"]
    with pytest.raises(InvalidRequest, match="--draft-id"):
        export(ExportPlan("m", "llamacpp", known, drafts[:1], False, "p"), ENGINES["vllm"])


def test_a_choice_without_a_draft_promises_nothing() -> None:
    plan = a_plan()
    choice, exported = export(plan, ENGINES["vllm"])
    remarks = list(list_remarks(plan, ENGINES["vllm"], choice, exported))
    assert (
        choice == Choice(None, None, {}) and "Drafts: none." in remarks and not any("Stays" in each for each in remarks)
    )
