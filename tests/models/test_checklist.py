"""The checklist of `edgespec plan`: each question has this machine's number, and its conclusion follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
    drafters = [DrafterPlan(drafter_specs()[name]) for name in draft.split("+")]
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
        "drafts pay from 10% for 1, 10% for 2, 10% for 4, 20% for 8; the autopilot drafts less the more are written"
    )
    assert dear["answers at once"] == "drafts never pay; they are written without drafts"
    # 1,000 tokens in forwards of 16 rows take 0.875 s, which is 88 plain steps.
    assert (
        "100 tokens take 1 s plain and 0.2" in cheap["length of answers"]
        and "below 88 tokens" in cheap["length of answers"]
    )
    assert dear["length of answers"].startswith("100 tokens take 1 s plain, reading")
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
    fit = Fit(1000, 1, MemoryEstimate(4 * GIB, GIB, 0), None, Memory(8 * GIB, ()))
    drafters = [DrafterPlan(drafter_specs()["self"], reference="layerskip:2")]
    found = list_practices(SpeedEstimate(CHEAP, None), fit, drafters, {"self": MANY}, is_foretold=False)
    told = {each.question: str(each) for each in found}
    assert "40% of the time over 40 answers; `edgespec bench` measures what" in told["acceptance of layerskip:2"]
    assert "drafts that cost nothing pay from 10% for 1" in told["answers at once"]
    assert "100 tokens take 1 s plain, reading" in told["length of answers"]


def test_cures_need_many_answers() -> None:
    few = AcceptanceRecord(answers=3, accepted=20, tested=100, recent=0.2)
    rows = {1: 1.0, 2: 1.3}
    assert check(rows, "model", model=few)["acceptance of model"].endswith("pays from 45%; more answers will tell")
    told = check(rows, "model", model=MANY)["acceptance of model"]
    assert "`edgespec adapt` trains it on your texts" in told and "--draft ngram leaves it out" in told
    assert "adapt" not in check(rows, "eagle3", eagle3=MANY)["acceptance of eagle3"]


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
