"""From a request to an open engine that knows what was measured and learned of the embedded pair before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import pytest

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.backends.options import LoadOptions
from edgespec.client.local import LocalEngine
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import MemoryUse, Request
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.open import Loader
from edgespec.engine.selfdraft_cache import Choice, SelfDraftCache
from edgespec.errors import Cancelled, DoesNotFit, UnknownModel
from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory
from edgespec.models.load_config import LoadConfig, MemoryOptions
from tests.engine.conftest import generate
from tests.gguf_models import REPOSITORY, TARGET
from tests.reporter import Heard

ONE = LoadOptions(threads=1, context_size=128)
PARD = REPOSITORY / "tests" / "fixtures" / "pard" / "model.gguf"
Open = Callable[[LoadConfig], LoadedModel]
T = TypeVar("T")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Seconds of every measurement asked for, none of which is made; caches and configuration are the test's own."""
    for name in ("EDGESPEC_CACHE_DIR", "EDGESPEC_CONFIG_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked: list[float] = []

    def measure(engine: Engine, seconds: float) -> Profile:
        asked.append(seconds)
        paid = [name for name, each in engine.drafters.items() if each.source is not None]
        return Profile({1: 0.01, 4: 0.011}, {name: DraftCost({1: 0.001}, 0.0001) for name in paid})

    monkeypatch.setattr(Engine, "measure", measure)
    return asked


@pytest.fixture
def open_(measured: list[float], heard: Heard) -> Iterator[Open]:
    with ExitStack() as closing:

        def opening(request: LoadConfig) -> LoadedModel:
            loaded = Loader().load(request)
            closing.callback(loaded.engine.close)
            return loaded

        yield opening


def changed(loaded: LoadedModel, request: LoadConfig, heard: Heard) -> LoadedModel:
    return Loader().change_draft(loaded, request)


def converse(loaded: LoadedModel) -> dict[str, object]:
    """What the autopilot knows after an answer."""
    generate(loaded.engine, Request("import os\nimport ", SamplingParams(temperature=0), max_tokens=20))
    return loaded.engine.draft_stats.to_dict()


def test_measured_once_then_loaded_with_what_was_learned(open_: Open, measured: list[float], heard: Heard) -> None:
    first = open_(LoadConfig(load=ONE))
    known = converse(first)
    first.save_stats()
    assert measured == [0.4]
    second = open_(LoadConfig(load=ONE))
    assert second.engine.draft_stats.to_dict() == known
    assert {key.partition(";")[0] for key in known["drafters"]} == {"ngram", "model"}
    assert (measured, heard.notices) == ([0.4], [])


def test_another_setting_is_measured(open_: Open, measured: list[float]) -> None:
    open_(LoadConfig(load=ONE)).save_stats()
    two = open_(LoadConfig(load=LoadOptions(threads=2, context_size=128)))
    assert len(measured) == 2
    two.save_stats()
    open_(LoadConfig(load=LoadOptions(threads=2, context_size=64)))
    open_(LoadConfig(load=ONE))
    assert len(measured) == 2, "both are known, and the context's size does not matter"


def test_under_another_setting_acceptance_is_known_and_gains_are_not(open_: Open, measured: list[float]) -> None:
    first = open_(LoadConfig(load=ONE))
    converse(first)
    known = first.engine.draft_stats
    # On a busy machine a short answer may have no drafts.
    known.records["model"] = known.records.get("model", AcceptanceRecord()).add(3, 5)
    first.save_stats()
    two = open_(LoadConfig(load=LoadOptions(threads=2, context_size=128))).engine.draft_stats
    assert two.records == known.records and two.records and len(measured) == 2
    for key, each in known.drafters.items():
        assert two.drafters[key].first_choice.value == each.first_choice.value
        assert {gain.evidence for gain in two.drafters[key].gains} == {(0.0, 0.0)}


def test_a_saved_cache_is_found_wherever_the_layers_are(measured: list[float], heard: Heard, tmp_path: Path) -> None:
    """As many layers are on a GPU as there is memory for, which differs from load to load."""
    memory, prompt = MemoryOptions(tmp_path / "memory"), "x = 1\n" * 100
    cached = []
    for layers in (None, 2, 0):
        options = LoadOptions(threads=1, context_size=1024, gpu_layers=layers, flash_attention=True)
        config = LoadConfig("python-6m", draft="none", load=options, memory=memory)
        with closing(Loader().load(config).engine) as engine:
            _, finished = generate(engine, Request(prompt, SamplingParams(0), 4, memory=MemoryUse()))
            cached.append(finished.metrics.cached_tokens)
    assert cached[0] == 0 and min(cached[1:]) > 200


def test_a_draft_changes_where_all_slots_hold_texts(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new drafts are measured in a slot, and the old engine had them all."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    config = LoadConfig("python-6m", draft="ngram", load=LoadOptions(threads=1, context_size=512, caches=2))
    loaded = Loader().load(config)
    for prompt in ("x = 1\n" * 60, "def f(a):\n" * 60):
        generate(loaded.engine, Request(prompt, SamplingParams(0), 4))
    assert len(loaded.engine.slots) == 2
    new = changed(loaded, replace(config, draft="ngram+model"), heard)
    assert list(new.engine.draft_stats.costs.profile.drafts) == ["model"]
    generate(new.engine, Request("x = 1\n" * 60, SamplingParams(0), 4))
    new.engine.close()


def test_another_draft_and_back(open_: Open, measured: list[float], heard: Heard) -> None:
    loaded = open_(LoadConfig(load=ONE))
    known = converse(loaded)
    lookups = changed(loaded, LoadConfig(load=ONE, draft="ngram"), heard)
    assert (lookups.info.draft, len(measured)) == ("ngram", 2)
    back = changed(lookups, LoadConfig(load=ONE, draft="model"), heard)
    assert back.info.drafters == {"model": "package:python-6m/draft.gguf"}
    assert (back.engine.draft_stats.to_dict(), len(measured)) == (known, 2)
    back.engine.release_draft()


def test_a_damaged_file_is_measured_again_and_healed(open_: Open, measured: list[float], heard: Heard) -> None:
    loaded = open_(LoadConfig(load=ONE))
    store = loaded.store
    assert store is not None
    store.path.parent.mkdir(parents=True)
    store.path.write_text('{"entries": [{"setting": {}, "experience": NaN}]}')
    open_(LoadConfig(load=ONE)).save_stats()
    assert (len(measured), heard.notices) == (2, [])
    assert store.load(loaded.key) is not None


@pytest.fixture
def pard(measured: list[float], tmp_path: Path) -> None:
    """The user's models.toml pairs the embedded model with a PARD model."""
    folder = tmp_path / "EDGESPEC_CONFIG_DIR"
    folder.mkdir()
    (folder / "models.toml").write_text(f'[python-6m.gguf]\npard = "{PARD}"\npard_token = 3\n')


def test_auto_loads_all_drafters_that_are_paired(open_: Open, pard: None, measured: list[float]) -> None:
    loaded = open_(LoadConfig(load=ONE))
    assert loaded.info.drafters == {"ngram": "ngram", "model": "package:python-6m/draft.gguf", "pard": str(PARD)}
    assert loaded.info.speculation.drafters == tuple(loaded.info.drafters)
    assert loaded.info.draft == f"ngram+package:python-6m/draft.gguf+{PARD}"
    known = converse(loaded)
    assert {key.partition(";")[0] for key in known["drafters"]} >= {"ngram", "model"} and measured == [0.4]  # type: ignore[attr-defined]


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a self-draft ends after a few trials."""
    monkeypatch.setattr("edgespec.engine.selfdraft_choice.EVALUATION_S", 0.5)
    monkeypatch.setattr("edgespec.client.worker._IDLE_S", 0.05)


@pytest.mark.parametrize("draft", ["layerskip", "ngram+layerskip"])
def test_the_layers_of_a_requested_self_draft_are_searched_once(
    open_: Open, heard: Heard, short_search: None, draft: str
) -> None:
    loaded = open_(LoadConfig(load=ONE, draft=draft))
    own = loaded.info.drafters["self"]
    assert list(loaded.info.drafters) == [*draft.split("+")[:-1], "self"] and own.startswith("layerskip:")
    assert heard.notices[0].startswith("Searching the layers of layerskip")
    assert heard.notices[1].startswith(f"Drafting by {own}: ")
    heard.notices.clear()
    assert open_(LoadConfig(load=ONE, draft=draft)).info.drafters["self"] == own
    assert len(heard.notices) == 1, "the choice is remembered"


def test_auto_searches_in_idle_time_where_no_draft_model_is_planned(
    measured: list[float], heard: Heard, short_search: None
) -> None:
    """After the first answer, without a word, and for later loads."""
    with closing(LocalEngine(uses_idle_time=True)) as engine:
        engine.open(LoadConfig(str(TARGET), load=ONE), heard).result()
        loaded = engine.require_loaded()
        cache = SelfDraftCache(loaded.target_path, loaded.info.name)
        sleep(0.5)
        assert cache.look_up(loaded.key, "auto") is None, "nothing was answered"
        list(engine.stream(Request("import os\n", SamplingParams(temperature=0), max_tokens=4)))
        choice = wait_for(lambda: cache.look_up(loaded.key, "auto"))
        assert choice.method.kept is not None and heard.notices == []
        engine.open(LoadConfig(str(TARGET), load=ONE), heard).result()
        assert ("self" in engine.require_loaded().info.drafters) == choice.pays


def test_a_request_interrupts_the_search(measured: list[float], heard: Heard, short_search: None) -> None:
    with closing(LocalEngine(uses_idle_time=True)) as engine:
        engine.open(LoadConfig(str(TARGET), load=ONE), heard).result()
        loaded = engine.require_loaded()
        request = Request("import os\n", SamplingParams(temperature=0), max_tokens=4)
        texts = set()
        for pause_s in (0.06, 0.1, 0.2):
            (*_, finished) = engine.stream(request)
            texts.add(finished.tokens)
            sleep(pause_s)
        assert len(texts) == 1
        wait_for(lambda: SelfDraftCache(loaded.target_path, loaded.info.name).look_up(loaded.key, "auto"))


def test_a_search_that_is_refused_is_not_tried_after_the_next_answer(
    measured: list[float], heard: Heard, short_search: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def search(loaded: LoadedModel) -> None:
        searched.append(loaded)
        raise Cancelled if len(searched) == 1 else DoesNotFit("it does not fit.", hint="None.")

    monkeypatch.setattr("edgespec.client.local.search_when_idle", search)
    with closing(LocalEngine(uses_idle_time=True)) as engine:
        engine.open(LoadConfig(backend="toy"), heard).result()
        for n in (1, 2, 2):
            list(engine.stream(Request("import os\n", SamplingParams(temperature=0), max_tokens=4)))
            sleep(0.4)
            assert len(searched) == n


def wait_for(find: Callable[[], T | None]) -> T:
    """What `find` returns within a minute."""
    until = monotonic() + 60
    while (found := find()) is None:
        assert monotonic() < until
        sleep(0.02)
    return found


def test_a_self_draft_that_was_found_to_pay_is_added(open_: Open, measured: list[float], heard: Heard) -> None:
    first = open_(LoadConfig(load=ONE))
    choice = Choice(SelfDraftSpec(range(2)), pays=True, reason="a test says so")
    SelfDraftCache(first.target_path, first.info.name).remember(first.key, "auto", choice)
    found = open_(LoadConfig(load=ONE))
    assert list(found.info.drafters) == ["ngram", "model", "self"] and found.info.drafters["self"] == "layerskip:2"
    assert heard.notices == []
    assert len(measured) == 2, "a self-draft makes another set of drafters"
    assert converse(found)["drafts"].keys() == {"model", "self"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_experts_that_a_model_has_not_are_told(
    has_gpu: bool, open_: Open, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = (DeviceMemory("CUDA0", 2**34, 2**34, shares_ram=False),) if has_gpu else ()
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): Memory(2**34, gpus))
    open_(LoadConfig("python-6m", "llamacpp", "none", load=replace(ONE, n_cpu_moe=3)))
    reason = "the model has no experts" if has_gpu else "llama.cpp uses no GPU"
    assert f"--n-cpu-moe has no effect, since {reason}." in heard.notices


def test_a_window_that_is_not_scored_is_told(open_: Open, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one while a text is alone, unless there is no memory for its cache."""
    told = "This model takes chains, not trees, since its 2 parallel answers have caches of their own."
    config = LoadConfig("python-6m", "llamacpp", "lookahead:3,3,3", load=replace(ONE, caches=2))
    loaded = open_(config)
    assert loaded.plan is not None and told not in heard.notices
    memory = Memory(RESERVE_BYTES + loaded.plan.fit.needed - 1)
    monkeypatch.setattr("edgespec.models.fit.host_memory", lambda _=(): memory)
    open_(replace(config, draft="ngram"))
    assert told not in heard.notices
    open_(config)
    assert told in heard.notices


def test_a_mistyped_drafter_is_refused_with_the_list(open_: Open) -> None:
    for config in (LoadConfig(load=ONE, draft="ngrm"), LoadConfig(backend="toy", draft="ngrm")):
        with pytest.raises(UnknownModel) as caught:
            open_(config)
        assert caught.value.hint.startswith("Did you mean ngram? Drafters: ngram, ")


def test_the_toy_runtime_keeps_nothing(
    open_: Open, measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").write_text("a file that happens to be called like a toy")
    loaded = open_(LoadConfig(backend="toy"))
    converse(loaded)
    loaded.save_stats()
    assert measured == [0.5]
    assert not (tmp_path / "EDGESPEC_CACHE_DIR").exists()
