"""Which self-draft is chosen, and what of that is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgespec.backends import Model, open_model
from edgespec.backends.attached_draft import SelfDraftSpec, Unsupported, parse
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.engine.draft_eval import DraftEval, Evaluator, Passage
from edgespec.engine.selfdraft_cache import (
    Choice,
    SelfDraftCache,
    cache_folder,
    list_cached_drafts,
    remove_cached_draft,
)
from edgespec.engine.selfdraft_search import SelfDraftSearch, quick_methods
from edgespec.errors import Cancelled
from tests.gguf_models import DRAFT, REPOSITORY, TARGET, mamba, sliding_window
from tests.reporter import Heard

SETTING = {"processor": "cpu", "threads": 1}
CHOICE = Choice(SelfDraftSpec(range(2)), True, "because")


def opened(path: Path, context: int = 512) -> Model:
    options = LoadOptions(threads=1, context_size=context)
    return open_model("llamacpp", path, options)


@pytest.fixture(scope="module")
def target() -> Iterator[Model]:
    model = opened(TARGET)
    yield model
    model.close()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("edgespec.engine.draft_eval._PROFILE_S", 0.1)


def workshop(target: Model, folder: Path, seconds: float = 60.0) -> SelfDraftSearch:
    return SelfDraftSearch(target, folder, seconds)


def test_layers_are_searched_and_all_that_is_tried_is_told(target: Model, tmp_path: Path) -> None:
    shop = workshop(target, tmp_path)
    choice = shop.choose([SelfDraftSpec(()), SelfDraftSpec(bits=2)])
    names = set(shop.trials)
    assert {"layerskip:2", "layerskip:1", "layerskip:3", "layerskip:0,1,2,3,5", "layerskip:0,5", "qspec:2"} <= names
    assert len(names) == 11  # three exits, four layers left out alone, then two, three and four of them; and two bits
    for trial in shop.trials.values():
        assert 0 <= trial.agreement <= 1 and trial.cost > 0 and trial.speedup >= 1
    assert shop.trials["qspec:2"].agreement > shop.trials["layerskip:1"].agreement
    assert str(choice.method) in names and choice.pays == (shop.trials[str(choice.method)].speedup >= 1.05)


def test_a_draft_model_that_is_better_stays(target: Model, tmp_path: Path) -> None:
    rival = opened(DRAFT)
    shop = workshop(target, tmp_path)
    choice = shop.choose([SelfDraftSpec((0, 1, 2, 3, 5))], rival)
    assert shop.rival is not None and 0 < shop.rival.agreement < 1
    assert choice.pays == (next(iter(shop.trials.values())).speedup >= 1.05 * shop.rival.speedup)
    rival.close()


def test_what_takes_time_to_make_is_told(target: Model, tmp_path: Path, heard: Heard) -> None:
    """A copy of low precision; layers that are skipped are there already."""
    workshop(target, tmp_path).choose([SelfDraftSpec((0, 1, 2, 3, 5))])
    assert not heard.fractions
    workshop(target, tmp_path).choose([SelfDraftSpec(bits=2)])
    assert max(heard.fractions) == 1.0


def test_nothing_can_be_made(tmp_path: Path) -> None:
    mamba(tmp_path / "mamba.gguf")
    model = opened(tmp_path / "mamba.gguf", 256)
    with pytest.raises(Unsupported, match="too few to skip any"):
        workshop(model, tmp_path).choose(quick_methods("llamacpp"))
    model.close()


def test_exits_before_the_first_layer_of_a_kind_are_left_out(tmp_path: Path) -> None:
    sliding_window(tmp_path / "model.gguf", pattern=[0, 0, 1, 1, 0, 1, 0])
    model = opened(tmp_path / "model.gguf")
    shop = workshop(model, tmp_path)
    shop.choose([SelfDraftSpec(())])
    assert "layerskip:3" in shop.trials and not {"layerskip:1", "layerskip:2"} & set(shop.trials)
    assert "layerskip:0,1,2,4,5,6" in shop.trials, "the file states the kinds of the layers behind the gap"
    model.close()


def test_trials_can_be_stopped(target: Model, tmp_path: Path) -> None:
    def check() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cancellable(check):
        SelfDraftSearch(target, tmp_path, 60.0).choose([SelfDraftSpec(())])
    shop = workshop(target, tmp_path, seconds=0.0)
    shop.choose([SelfDraftSpec(())])
    assert list(shop.trials) == ["layerskip:2"], "the time for a search is kept"


def test_a_draft_that_is_the_target_agrees_with_it(target: Model) -> None:
    session, twin = target.open_session(), target.open_session()
    passages = [Passage.end_of(range(10, 110), target.context_size), Passage(range(30, 50), 12)]
    evaluator = Evaluator(session, passages)
    trial = evaluator.evaluate(twin)
    assert trial.agreement == 1.0 and 0.2 < trial.cost < 5
    with pytest.raises(ValueError, match="too short"):
        Passage.end_of([1, 2, 3], target.context_size)
    session.close()
    twin.close()
    assert str(DraftEval(0.5, 0.25, 1, 1.2)) == "50% agreement, a draft token costs 0.25 plain steps"


def test_a_shelf_remembers_by_setting_and_request(tmp_path: Path) -> None:
    cache = SelfDraftCache(TARGET, "python-6m")
    assert cache.look_up(SETTING, "auto") is None
    cache.remember(SETTING, "auto", CHOICE)
    other = {**SETTING, "threads": 2}
    cache.remember(other, "auto", Choice(SelfDraftSpec(bits=2), False, "no"))
    assert SelfDraftCache(TARGET, "x").look_up(SETTING, "auto") == CHOICE
    assert SelfDraftCache(TARGET, "x").look_up(other, "auto") == Choice(SelfDraftSpec(bits=2), False, "no")
    assert SelfDraftCache(TARGET, "x").look_up(SETTING, "layerskip") is None
    assert SelfDraftCache(DRAFT, "x").look_up(SETTING, "auto") is None
    cache.remember(SETTING, "auto", Choice(SelfDraftSpec(range(3)), True, "better"))
    found = SelfDraftCache(TARGET, "x").look_up(SETTING, "auto")
    assert found is not None and str(found.method) == "layerskip:3"


CRASH = """
import os, signal
from tests.engine.test_selfdraft_search import SETTING, SelfDraftCache, TARGET
with SelfDraftCache(TARGET, "python-6m").trying(SETTING, "auto"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_search_in_which_three_processes_have_ended_is_not_tried_again() -> None:
    cache = SelfDraftCache(TARGET, "python-6m")
    with pytest.raises(Cancelled), cache.trying(SETTING, "auto"):
        raise Cancelled
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", CRASH], cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    with pytest.raises(Unsupported, match="has ended 3 times"), cache.trying(SETTING, "auto"):
        pass
    with ExitStack() as held:
        held.enter_context(cache.trying(SETTING, "layerskip"))
        with pytest.raises(Unsupported, match="another process"):
            held.enter_context(cache.trying(SETTING, "layerskip"))
    (found,) = list_cached_drafts()
    assert "auto: its search was cut off 3 times" in found.choices
    remove_cached_draft(found)
    with cache.trying(SETTING, "auto"):
        pass


@pytest.mark.parametrize("damage", ["", '{"entries": [3]}', '{"entries": [{"setting": {}}]}'])
def test_a_damaged_note_is_no_note(damage: str) -> None:
    cache = SelfDraftCache(TARGET, "python-6m")
    cache.folder.mkdir(parents=True)
    (cache.folder / "choices.json").write_text(damage)
    assert cache.look_up(SETTING, "auto") is None
    list_cached_drafts()
    cache.remember(SETTING, "auto", CHOICE)
    assert cache.look_up(SETTING, "auto") == CHOICE


def test_a_choice_that_cannot_be_read_is_none() -> None:
    cache = SelfDraftCache(TARGET, "python-6m")
    cache.remember(SETTING, "auto", CHOICE)
    file = cache.folder / "choices.json"
    notes = json.loads(file.read_text())
    for method in ("qspec:99", "a model", None, 7):
        notes["entries"][0]["choice"]["method"] = method
        file.write_text(json.dumps(notes))
        assert cache.look_up(SETTING, "auto") is None


def test_what_is_kept_can_be_seen_and_removed(target: Model) -> None:
    assert list_cached_drafts() == []
    cache = SelfDraftCache(TARGET, "python-6m")
    cache.remember(SETTING, "auto", CHOICE)
    method = parse("qspec:2")
    assert method is not None
    target.make_self_draft(method, folder=cache.folder).close()
    (found,) = list_cached_drafts()
    assert found.model == "python-6m" and [c.name for c in found.copies] == ["target-q2_k.gguf"]
    assert found.choices == ("auto: layerskip:2, because",) and found.size == found.copies[0].stat().st_size
    size = found.size
    assert remove_cached_draft(found) == size > 0
    assert list_cached_drafts() == [] and list(cache_folder().iterdir()) == []
