"""The checklist of `edgespec plan`: each question has this machine's number, and its conclusion follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.store import ProfileStore, current_setting
from edgespec.backends.options import LoadOptions
from edgespec.drafters.registry import drafter_specs
from edgespec.machines.memory import RESERVE_BYTES, Memory
from edgespec.models.checklist import list_practices
from edgespec.models.drafts import DrafterPlan
from edgespec.models.fit import Fit, MemoryEstimate
from edgespec.models.hub import Hub
from edgespec.models.learned import find_stats
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import plan
from edgespec.models.registry import load_registry
from edgespec.models.report import report_plan
from edgespec.models.speed import SpeedEstimate
from edgespec.units import GIB
from tests.gguf_models import DRAFT, TARGET

CHEAP = {1: 0.01, 2: 0.0105, 4: 0.011, 8: 0.012, 16: 0.014}
DEAR = {1: 0.01, 2: 0.021, 4: 0.042, 8: 0.084, 16: 0.168}
MANY = AcceptanceRecord(answers=40, accepted=120, tested=300, recent=0.4)


def check(
    rows: dict[int, float], draft: str = "ngram", free: int = 8 * GIB, **records: AcceptanceRecord
) -> dict[str, str]:
    """The lines of a model of 5 GiB whose drafts cost a tenth of a plain step, by their questions."""
    fit = Fit(1000, 1, MemoryEstimate(4 * GIB, GIB, 0), None, Memory(free + RESERVE_BYTES, ()))
    drafters = [DrafterPlan(drafter_specs()[name]) for name in draft.split("+") if name]
    expected = SpeedEstimate(rows, 0.1 * rows[1] if "model" in draft else None)
    return {each.question: f"{each.here}; {each.follows}" for each in list_practices(expected, fit, drafters, records)}


def test_each_number_has_its_conclusion() -> None:
    cheap, dear = check(CHEAP), check(DEAR)
    assert (
        cheap["price of rows"]
        == "four take 1.10 plain steps; reading the weights takes the time here, and drafts save that"
    )
    assert "four take 4.20 plain steps; computing takes the time" in dear["price of rows"]
    assert cheap["kind of work"].startswith("no answers yet, and lookups pay from 10%; ")
    assert dear["kind of work"].startswith("no answers yet, and lookups never pay here; ")
    assert cheap["answers at once"] == (
        "drafts that cost nothing, as lookups, pay from 10% for 1, 10% for 2, 10% for 4, 20% for 8; "
        "the autopilot drafts less the more are written"
    )
    never = "drafts that cost nothing, as lookups, never pay; the autopilot writes 1 or 2 or 4 or 8 without drafts"
    assert dear["answers at once"] == never
    # 1,000 tokens in forwards of 16 rows take 0.875 s, which is 88 plain steps.
    assert cheap["length of answers"].startswith("100 tokens take 1 s plain, 0.2")
    assert "with 80% accepted, and a prompt of 1,000 at most 0.875 s; " in cheap["length of answers"]
    assert "less than about 88 tokens" in cheap["length of answers"]
    assert dear["length of answers"].startswith("100 tokens take 1 s plain, and a prompt of 1,000 at most ")
    assert cheap["memory left"] == "3.0 GiB; enough for 3 more answers at once of 1,000 tokens each"
    assert check(CHEAP, free=4 * GIB)["memory left"].startswith("none; a shorter --ctx")


def test_measured_acceptance_decides() -> None:
    assert check(CHEAP, ngram=MANY)["kind of work"] == (
        "lookups are right 40% of the time over 40 answers, and pay from 10%; the texts repeat enough"
    )
    assert check({1: 1.0, 2: 1.5}, ngram=MANY)["kind of work"].endswith(
        "pay from 55%; the texts repeat too little for them"
    )
    pair = check(CHEAP, "ngram+model", model=MANY)
    assert pair["acceptance of model"].startswith("40% of the time over 40 answers, and it pays from 20%; drafts of ")
    assert "no answers yet" in pair["kind of work"]
    fresh = check(CHEAP, "ngram+model")["acceptance of model"]
    assert fresh.startswith("not measured yet, and it pays from 20%; ")


def test_nothing_is_foretold_of_a_draft_whose_cost_is_not_known() -> None:
    told = check(CHEAP, "self", self=MANY)
    assert told["acceptance of self"].startswith("40% of the time over 40 answers; `edgespec bench` measures what")
    assert told["answers at once"].startswith("drafts that cost nothing, as lookups, pay from 10% for 1")
    assert told["length of answers"].startswith("100 tokens take 1 s plain, and a prompt")
    beside = check(CHEAP, "model+eagle3", model=MANY, eagle3=MANY)
    assert "drafts of" in beside["acceptance of model"] and "drafts of" not in beside["acceptance of eagle3"]
    assert check(CHEAP, "")["length of answers"].startswith("100 tokens take 1 s plain, and a prompt")


def test_the_length_of_answers_goes_by_the_model_and_not_by_the_lookups_beside_it() -> None:
    lookups = AcceptanceRecord(answers=40, accepted=100, tested=10_000, recent=0.01)
    told = check(CHEAP, "ngram+model", ngram=lookups, model=MANY)
    assert "with 40% accepted" in told["length of answers"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({1: 1.0, 2: 2.2, 4: 4.4, 8: 9.0, 16: 9.5}, "the autopilot writes 1 without drafts"),
        ({1: 1.0, 2: 1.5, 4: 1.8}, "the autopilot decides by the answers that are written"),
    ],
)
def test_more_answers_at_once_do_not_always_cost_more(rows: dict[int, float], told: str) -> None:
    assert check(rows)["answers at once"].endswith(f"; {told}")


def test_memory_for_further_answers() -> None:
    """Recurrent models have states in place of a cache, and with workers this machine's own part runs out first."""

    def left(target: MemoryEstimate, **more: Any) -> str:
        fit = Fit(1000, 1, target, None, Memory(8 * GIB + RESERVE_BYTES, ()), **more)
        return str(next(each for each in list_practices(SpeedEstimate(CHEAP, None), fit, [], {}) if "GiB" in str(each)))

    assert left(MemoryEstimate(4 * GIB, 0, 0, GIB)).endswith(
        "3.0 GiB; enough for 3 more answers at once of 1,000 tokens each"
    )
    assert left(MemoryEstimate(4 * GIB, 0, 0)).endswith("4.0 GiB; further answers at once take next to none")
    own = Memory(4 * GIB + RESERVE_BYTES, ()), 0.5
    assert "1.5 GiB; enough for 1 more" in left(MemoryEstimate(4 * GIB, GIB, 0), own=own)


def test_cures_need_many_answers() -> None:
    few = AcceptanceRecord(answers=3, accepted=20, tested=100, recent=0.2)
    rows = {1: 1.0, 2: 1.3}
    assert check(rows, "model", model=few)["acceptance of model"].endswith("pays from 45%; more answers will tell")
    told = check(rows, "model", model=MANY)["acceptance of model"]
    assert "`edgespec adapt` trains it on your texts" in told and "--draft ngram leaves it out" in told


def test_what_answers_have_taught_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under other settings too, and not for another version of the draft."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    request = LoadConfig(str(TARGET), "llamacpp", str(DRAFT), load=LoadOptions(threads=1, context_size=256))
    planned = plan(request, load_registry(), Hub.from_environment())
    assert find_stats(planned, Hub.from_environment()) is None
    stats = DraftStats(Profile(CHEAP))
    stats.records["model"] = MANY
    ProfileStore(TARGET, [DRAFT]).save(current_setting("llamacpp", LoadOptions(threads=2)), stats)
    (report,) = report_plan(request, load_registry(), Hub.from_environment(), measure=False)
    assert report.records == {"model": MANY} and report.checklist == []
    layers = replace(request, draft="layerskip:0,1")
    assert find_stats(plan(layers, load_registry(), Hub.from_environment()), Hub.from_environment()) is None
