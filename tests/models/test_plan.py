"""From a request to the drafters that will be loaded, on files whose headers alone are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.errors import DoesNotFit, DraftRefused, UnknownModel
from edgespec.formats.gguf_validate import read_file
from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory
from edgespec.models.fit import Fit, MemoryEstimate, estimate_memory, score_bytes
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig, MemoryOptions
from edgespec.models.network import PROCESS_BYTES
from edgespec.models.plan import Plan, _free, plan
from edgespec.models.registry import Registry, load_registry
from edgespec.models.report import describe_plan, report_plan
from edgespec.models.report_text import format_plan
from edgespec.models.speed import MachineSpeed
from edgespec.units import GIB
from tests.formats.ggufs import TOKENS, write_gguf
from tests.gguf_models import DRAFT, TARGET
from tests.reporter import Heard

CONTEXT = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """target.gguf, draft.gguf, pard.gguf (which names no mask token), own.gguf (which does)."""
    write_gguf(tmp_path / "target.gguf", pad_bytes=2**22)
    write_gguf(tmp_path / "draft.gguf", pad_bytes=2**20)
    write_gguf(tmp_path / "pard.gguf", pad_bytes=2**21)
    write_gguf(tmp_path / "own.gguf", mask=9)
    write_gguf(tmp_path / "other.gguf", tokens=TOKENS[::-1])
    return tmp_path


def registry_of(folder: Path, *lines: str) -> Registry:
    path = folder / "models.toml"
    given = [f'target = "{folder}/target.gguf"', *(line.format(folder=folder) for line in lines)]
    path.write_text("\n".join(["[here.gguf]", *given, ""]), encoding="utf-8")
    return load_registry(path)


@pytest.fixture
def paired(folder: Path) -> Registry:
    """An alias `here` with a draft model and a PARD model, whose mask token is 7."""
    return registry_of(folder, 'draft = "{folder}/draft.gguf"', 'pard = "{folder}/pard.gguf"', "pard_token = 7")


def planned(registry: Registry, heard: Heard, draft: str = "auto", *, force: bool = False) -> Plan:
    request = LoadConfig("here", "llamacpp", draft, load=LoadOptions(threads=1, context_size=CONTEXT), force=force)
    return plan(request, registry, Hub.from_environment())


def drafters(found: Plan) -> list[tuple[str, str]]:
    return [(each.spec.name, Path(each.label).name) for each in found.drafters]


def limit_memory(monkeypatch: pytest.MonkeyPatch, folder: Path, *files: str) -> None:
    """This machine has the memory that target and `files` need together, and no more."""
    headers = [read_file(folder / name) for name in ("target.gguf", *files)]
    needed = sum(estimate_memory(header, CONTEXT, together=i == 0).total for i, header in enumerate(headers))
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(RESERVE_BYTES + needed))


def test_auto_takes_whatever_is_available(folder: Path, paired: Registry, heard: Heard) -> None:
    found = planned(paired, heard)
    assert drafters(found) == [("ngram", "ngram"), ("model", "draft.gguf"), ("pard", "pard.gguf")]
    assert [each.mask_token for each in found.drafters] == [None, None, 7]
    bare = registry_of(folder)
    assert drafters(planned(bare, heard)) == [("ngram", "ngram")]
    for draft, example in (("model", "one: model:REF."), ("ngram+pard", "one: pard:REF.")):
        with pytest.raises(DraftRefused, match="model is paired with this target") as caught:
            planned(bare, heard, draft)
        assert caught.value.hint.endswith(example)
    only_pard = registry_of(folder, 'pard = "{folder}/own.gguf"')
    assert drafters(planned(only_pard, heard)) == [("ngram", "ngram"), ("pard", "own.gguf")]
    assert heard.notices == []


def test_exactly_what_is_named_is_taken_in_that_order(folder: Path, paired: Registry, heard: Heard) -> None:
    assert drafters(planned(paired, heard, "model")) == [("model", "draft.gguf")]
    assert drafters(planned(paired, heard, "pard+ngram")) == [("pard", "pard.gguf"), ("ngram", "ngram")]
    both = planned(paired, heard, f"ngram+{folder}/draft.gguf+layerskip:1")
    assert drafters(both) == [("ngram", "ngram"), ("model", "draft.gguf"), ("self", "layerskip:1")]
    assert str(both.self_draft) == "layerskip:1" and len(both.models) == 1
    assert planned(paired, heard, "none").drafters == ()


def test_a_model_without_a_mask_token_is_no_pard_model(folder: Path, heard: Heard) -> None:
    nameless = registry_of(folder, 'pard = "{folder}/pard.gguf"')
    assert drafters(planned(nameless, heard)) == [("ngram", "ngram")]
    assert len(heard.notices) == 1 and "names no mask token" in heard.notices[0]
    for draft in ("pard", f"pard:{folder}/draft.gguf"):
        with pytest.raises(DraftRefused, match="names no mask token") as caught:
            planned(nameless, heard, draft)
        assert "pard_token" in caught.value.hint
    assert drafters(planned(nameless, heard, f"pard:{folder}/own.gguf")) == [("pard", "own.gguf")]


def test_the_registrys_mask_token_is_for_its_own_model(folder: Path, paired: Registry, heard: Heard) -> None:
    own = registry_of(folder, 'pard = "{folder}/own.gguf"', "pard_token = 7")
    assert [each.mask_token for each in planned(own, heard, "pard").drafters] == [9], "the file's goes first"
    assert [each.mask_token for each in planned(paired, heard, f"pard:{folder}/pard.gguf").drafters] == [7]
    with pytest.raises(DraftRefused, match="names no mask token"):
        planned(paired, heard, f"pard:{folder}/draft.gguf")


def test_a_draft_with_another_tokenizer_is_left_out_or_refused(folder: Path, heard: Heard) -> None:
    registry = registry_of(folder, 'draft = "{folder}/other.gguf"')
    assert drafters(planned(registry, heard)) == [("ngram", "ngram")]
    assert heard.notices[0].startswith(f"Drafting without {folder}/other.gguf: ")
    with pytest.raises(DraftRefused, match="cannot draft for this target"):
        planned(registry, heard, "ngram+model")


def test_a_mistyped_drafter_leads_to_the_list(paired: Registry, heard: Heard) -> None:
    for draft, meant in (("ngrm", "ngram"), ("ngram+qspek:3", "qspec"), ("pard:modle", "model")):
        with pytest.raises(UnknownModel, match=r"model called|not a model reference") as caught:
            planned(paired, heard, draft)
        assert f"Did you mean {meant}? Drafters: ngram, " in caught.value.hint


def test_auto_drops_the_last_draft_model_first(
    folder: Path, paired: Registry, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, folder, "draft.gguf", "pard.gguf")
    assert len(planned(paired, heard).models) == 2 and heard.notices == []
    limit_memory(monkeypatch, folder, "draft.gguf")
    found = planned(paired, heard)
    assert drafters(found) == [("ngram", "ngram"), ("model", "draft.gguf")] and found.fit.headroom == 0
    told = f"Drafting without {folder}/pard.gguf: it does not fit in memory with the target."
    assert heard.notices == [told]
    limit_memory(monkeypatch, folder)
    assert drafters(planned(paired, heard)) == [("ngram", "ngram")]
    assert heard.notices[1:] == [told, told.replace("pard", "draft")]
    with pytest.raises(DoesNotFit):  # what was named is not dropped
        planned(paired, heard, "ngram+model+pard")
    assert len(planned(paired, heard, "ngram+model+pard", force=True).models) == 2


def test_a_budget_leaves_out_drafts_first_and_then_caches(folder: Path, paired: Registry, heard: Heard) -> None:
    def fit(max_bytes: int) -> Plan:
        load = LoadOptions(threads=1, context_size=CONTEXT, caches=4)
        request = LoadConfig("here", "llamacpp", load=load, max_bytes=PROCESS_BYTES + max_bytes)
        return plan(request, paired, Hub.from_environment())

    header = read_file(folder / "target.gguf")
    four, two, one = (estimate_memory(header, CONTEXT, caches=n, together=True).total for n in (4, 2, 1))
    alone = fit(four)
    assert (drafters(alone), alone.options.caches, alone.fit.headroom) == ([("ngram", "ngram")], 4, 0)
    assert len(heard.notices) == 2 and all(told.startswith("Drafting without") for told in heard.notices)
    fewer = fit(two)
    assert fewer.options.caches == fewer.fit.caches == 2 and fewer.fit.headroom == 0
    assert heard.notices[-1].startswith(f"Memory holds 2 KV caches of {CONTEXT:,} tokens, not 4.")
    with pytest.raises(DoesNotFit, match=r"are allowed, beside 128 MiB for the process itself") as told:
        fit(one - 1)
    assert "--draft" not in told.value.hint, "lookups alone draft already"


def test_flash_attention_stays_on_where_scores_do_not_fit(folder: Path, paired: Registry, heard: Heard) -> None:
    header = read_file(folder / "target.gguf")

    def fit(spare: int, flash: bool | None = None) -> Plan:
        needed = estimate_memory(header, CONTEXT).total + spare
        load = LoadOptions(threads=1, context_size=CONTEXT, flash_attention=flash)
        request = LoadConfig("here", "llamacpp", draft="none", load=load, max_bytes=PROCESS_BYTES + needed)
        return plan(request, paired, Hub.from_environment())

    scores = score_bytes(header, CONTEXT)
    assert scores == 4 * 512 * max(header.per_block("attention.head_count") or ()) * CONTEXT
    assert fit(scores).options.flash_attention is None
    assert fit(scores - 1).options.flash_attention is True
    assert fit(scores, flash=False).fit.headroom == 0
    with pytest.raises(DoesNotFit):
        fit(scores - 1, flash=False)


@pytest.mark.parametrize("share", [2.0, 0.6])
def test_what_an_open_model_takes_of_a_gpu_counts_as_free(
    share: float, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is changed leaves the target's layers where they are, and another model has room as without it."""

    def leave_free(n: int) -> None:
        gpu = DeviceMemory("CUDA0", RESERVE_BYTES + n, 2 * RESERVE_BYTES, shares_ram=False)
        monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(2 * RESERVE_BYTES, (gpu,)))

    def ask(opened: Plan | None = None, *, stays: bool = False) -> Plan:
        load = LoadOptions(threads=1, context_size=CONTEXT)
        request = LoadConfig(str(TARGET), "llamacpp", "none", load=load, force=True)
        return plan(request, load_registry(), Hub.from_environment(), opened=opened, stays=stays)

    leave_free(int(share * estimate_memory(read_file(TARGET), CONTEXT, together=True).total))
    opened = ask()
    assert (opened.options.gpu_layers is None) == (share > 1) == (heard.notices == [])
    heard.notices.clear()
    leave_free(0)
    kept, other = ask(opened, stays=True), ask(opened)
    assert kept.options == other.options == opened.options and kept.fit.memory.devices == opened.fit.memory.devices
    assert len(heard.notices) == (share < 1)  # what the load of another model says too


@pytest.mark.parametrize(
    ("spare", "option", "places"),
    [(1.0, None, (None, None)), (0.9, None, (None, 0)), (-0.1, None, (5, 0)), (0.9, 0, (None, 0)), (0.9, 9, (5, 9))],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_draft_takes_no_room_of_the_target_on_a_gpu(
    spare: float,
    option: int | None,
    places: tuple[int | None, int | None],
    is_open: bool,
    heard: Heard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device holds the target and `spare` of the draft; `places` are layers of each on it."""
    target = estimate_memory(read_file(TARGET), CONTEXT, together=True).total
    free = target + int(spare * estimate_memory(read_file(DRAFT), CONTEXT).total)
    gpu = DeviceMemory("CUDA0", RESERVE_BYTES + free, 2 * RESERVE_BYTES)
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(2 * RESERVE_BYTES, (gpu,)))

    def ask(draft: str, opened: Plan | None = None) -> Plan:
        load = LoadOptions(threads=1, context_size=CONTEXT, flash_attention=True, gpu_layers_draft=option)
        request = LoadConfig(str(TARGET), "llamacpp", draft, load=load)
        return plan(request, load_registry(), Hub.from_environment(), opened=opened, stays=opened is not None)

    opened = ask("none") if is_open else None
    found = ask(f"model:{DRAFT}", opened).options
    there = opened.options.gpu_layers if opened is not None else places[0]
    assert (found.gpu_layers, found.gpu_layers_draft) == (there, places[1])
    moved = [each for each in heard.notices if each.startswith("The draft stays in RAM")]
    assert len(moved) == (places[1] == 0 and option is None)


@pytest.mark.parametrize(("layers", "fits"), [(None, True), (0, False)])
def test_a_gpu_without_layers_holds_nothing(
    layers: int | None, fits: bool, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = DeviceMemory("CUDA0", 2**34, 2**34)
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(RESERVE_BYTES, (gpu,)))
    load = LoadOptions(threads=1, context_size=CONTEXT, gpu_layers=layers)
    request = LoadConfig(str(TARGET), "llamacpp", "none", load=load, force=True)
    assert plan(request, load_registry(), Hub.from_environment()).fit.fits == fits


def test_what_is_free_without_an_open_model_is_what_was_free_before_it() -> None:
    def memory(ram: int, *free: int) -> Memory:
        gpus = (DeviceMemory(f"CUDA{i}", RESERVE_BYTES + n, 2**40, shares_ram=False) for i, n in enumerate(free))
        return Memory(RESERVE_BYTES + ram * GIB, tuple(gpus))

    half = Fit(4096, 1, MemoryEstimate(30 * GIB, 9 * GIB, GIB), None, memory(40, 24 * GIB, 8 * GIB))
    left = replace(memory(32, 0, 0), devices=memory(0, 0, 0).devices[1:])  # --device CUDA1 alone
    found = _free(left, half, stays=False)
    assert found.ram_available - RESERVE_BYTES == (32 + 8) * GIB, "32 GiB of it are on GPUs"
    assert [(gpu.name, gpu.free - RESERVE_BYTES) for gpu in found.devices] == [("CUDA1", 8 * GIB)]
    assert _free(left, half, stays=True).ram_available - RESERVE_BYTES == 34 * GIB, (
        "a fifth of its caches, and no weights"
    )
    shared = replace(half, memory=memory(80, 8 * GIB), own=(memory(20), 0.25))
    assert _free(memory(10), shared, stays=False).ram_available - RESERVE_BYTES == 20 * GIB, "its share is 10 GiB"


@pytest.mark.parametrize(("layers", "foretold"), [(None, True), (0, True), (3, False), (99, True)])
def test_no_speed_is_foretold_for_a_model_that_is_partly_on_a_gpu(
    layers: int | None, foretold: bool, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is in one place, and its rates are kept by that place."""
    gpu = DeviceMemory("CUDA0", 2**34, 2**34, shares_ram=False)
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(2**34, (gpu,)))
    measured: list[LoadOptions] = []

    def measure(types: object, report: object, options: LoadOptions) -> MachineSpeed:
        measured.append(options)
        return MachineSpeed()

    monkeypatch.setattr("edgespec.models.report.measure_speed", measure)
    load = LoadOptions(threads=1, context_size=CONTEXT, gpu_layers=layers)
    request = LoadConfig(str(TARGET), "llamacpp", "none", load=load)
    *_, report = report_plan(request, load_registry(), Hub.from_environment())
    assert bool(measured) == foretold
    assert report.to_dict()["not_foretold"].startswith("its type" if foretold else "a part of it is on the GPU")


def test_the_report_shows_all_drafters(folder: Path, paired: Registry, heard: Heard) -> None:
    found = planned(paired, heard)
    facts = describe_plan(found).to_dict()
    assert facts["draft"] == f"ngram+{folder}/draft.gguf+{folder}/pard.gguf"
    assert facts["draft_models"] == [f"{folder}/draft.gguf", f"{folder}/pard.gguf"]
    assert found.fit.draft is not None and facts["draft_bytes"] == found.fit.draft.total
    lines = list(format_plan(describe_plan(found)))
    assert lines[0] == "here on llamacpp, drafted by ngram+draft.gguf+pard.gguf"
    assert any(line.startswith("  draft models: ") for line in lines)
    alone = list(format_plan(describe_plan(planned(paired, heard, "model"))))
    assert any(line.startswith("  draft model: ") for line in alone)
    assert "drafted by none" in next(format_plan(describe_plan(planned(paired, heard, "none"))))


def test_earlier_texts_are_drafted_from_where_they_are_kept(folder: Path, paired: Registry, heard: Heard) -> None:
    kept = LoadConfig("here", "llamacpp", load=LoadOptions(threads=1), memory=MemoryOptions(folder / "memory"))
    forgotten = replace(kept, memory=None)

    def names(config: LoadConfig) -> list[str]:
        return [each.spec.name for each in plan(config, paired, Hub.from_environment()).drafters]

    assert "suffix" in names(kept) and "suffix" not in names(forgotten)
    assert names(forgotten) == [name for name in names(kept) if name in names(forgotten)]
    assert names(replace(kept, draft="suffix")) == ["suffix"]
    with pytest.raises(DraftRefused, match="the drafter suffix needs the memory of earlier texts, which is off"):
        names(replace(forgotten, draft="suffix"))
