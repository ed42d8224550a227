"""The engine with the autopilot: plain decoding's text, the rule by temperature and seed, what is kept and measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Rule, Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.bench.divergence import first_divergence
from edgespec.cancel import cancellable
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Notice, Request
from edgespec.errors import Cancelled
from tests.core.toys import Alarm
from tests.engine.conftest import PLAIN, eager, generate, list_loaded
from tests.engine.prompts import CODE
from tests.gguf_models import TARGET, hybrid, mamba

GREEDY = SamplingParams(temperature=0)
WARM = SamplingParams(temperature=0.8, top_p=0.95)
KINDS = {"model": Speculation(("ngram", "model")), "ngram": Speculation(("ngram",))}


def loaded(path: Path, options: LoadOptions, n: int) -> Engine:
    models = [open_model("llamacpp", path, options) for _ in range(n)]
    return Engine(models[0], list_loaded(**({"model": models[1]} if n > 1 else {})), PLAIN)


def rules(draft_stats: DraftStats) -> set[str]:
    """The ways of sampling under which anything was learned."""
    return {
        key.partition("; ")[2].split(",")[0]
        for key, stats in draft_stats.drafters.items()
        if any(rate.evidence[1] for rate in stats.rates)
    }


def check_equal_or_near_tie(engine: Engine, prompt: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if found != expected:
        session = engine.target.open_session()
        fork = first_divergence(session, engine.encode(prompt), expected, found)
        session.close()
        assert fork is not None and fork.is_near_tie, (prompt, fork)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_plain_decodings(engine: Engine, kind: str) -> None:
    engine.draft_stats = eager()
    accepted = rejected = 0
    for prompt in CODE[:4]:
        request = Request(prompt, GREEDY, max_tokens=40)
        engine.speculation = PLAIN
        expected = generate(engine, request)[1].tokens
        engine.speculation = KINDS[kind]
        finished = generate(engine, request)[1]
        check_equal_or_near_tie(engine, prompt, expected, finished.tokens)
        accepted += finished.metrics.accepted_tokens
        rejected += finished.metrics.drafted_tokens - finished.metrics.accepted_tokens
    assert accepted > 10 and rejected > 10


@pytest.mark.parametrize(
    ("speculation", "temperature", "seed", "rule"),
    [
        (Speculation(("ngram", "model")), 0.8, None, "block"),
        (Speculation(("ngram", "model")), 0.5, None, "block"),
        (Speculation(("ngram", "model")), 0.4, None, "sample"),
        (Speculation(("ngram", "model")), 0.8, 0, "sample"),
        (Speculation(("ngram", "model")), 0.0, None, "sample"),
        (Speculation(("model",), 3), 0.8, None, "block"),
        (Speculation(("model",), 3, 3), 0.8, None, "block"),
        (Speculation(("model",), 3, 5), 0.8, None, "sample"),
        (Speculation(("model",), 0), 0.8, None, "sample"),
        (Speculation(("ngram",)), 0.8, None, "sample"),
        (Speculation((), 0), 0.8, None, "sample"),
        (Speculation(), 0.8, None, "sample"),
        (Speculation(("self",), 3), 0.8, None, "block"),
        (Speculation(("ngram", "pard")), 0.8, None, "block"),
        (Speculation(("ngram", "model"), acceptance="sample"), 0.8, None, "sample"),
        (Speculation(("ngram", "model"), acceptance="rejection"), 0.8, 7, "rejection"),
        (Speculation(("ngram", "model"), acceptance="block"), 0.1, 7, "block"),
        (Speculation(("ngram", "model"), acceptance="block"), 0.0, None, "sample"),
    ],
)
def test_the_rule(speculation: Speculation, temperature: float, seed: int | None, rule: Rule) -> None:
    assert speculation.choose_rule(temperature, seeded=seed is not None) == rule


def test_what_is_learned_serves_the_next_request(engine: Engine) -> None:
    engine.speculation = KINDS["model"]
    engine.draft_stats = known = eager()
    evidence, reasons = [0.0], []
    for prompt in CODE[:3]:
        steps = [event for event in engine.stream(Request(prompt, GREEDY, max_tokens=30)) if isinstance(event, Step)]
        reasons.append([step.decision.reason for step in steps if step.decision])
        assert engine.draft_stats is known
        evidence.append(sum(each.first_choice.evidence[1] for each in known.drafters.values()))
    assert evidence == sorted(set(evidence)), "each text adds to it"
    measuring = [each.count("to measure plain decoding") for each in reasons]
    assert measuring == [3, 0, 0], "once is enough"
    engine.speculation = KINDS["ngram"]
    generate(engine, Request(CODE[3], WARM, max_tokens=30, seed=1))
    assert rules(known) == {"sample at 0.0", "sample at 0.8"}, "each way of sampling by itself"


@pytest.mark.parametrize(("row_s", "pays_from"), [(0.6, "70%"), (0.02, "")])
def test_a_low_acceptance_over_many_answers_is_told_once_with_its_cures(row_s: float, pays_from: str) -> None:
    """If it is lower than pays on this machine."""
    target, draft = load("tree", LoadOptions()), load("draft", LoadOptions())
    engine = Engine(target, list_loaded(model=draft), Speculation(("ngram", "model")))
    rows = {n: 1 + row_s * (n - 1) for n in (1, 2, 4, 8)}
    engine.draft_stats = DraftStats(Profile(rows, {"model": DraftCost({1: 0.05})}))
    engine.draft_stats.records["model"] = AcceptanceRecord(57, 380, 1000, 0.3)
    engine.draft_stats.records["ngram"] = AcceptanceRecord(57, 380, 1000, 0.3)
    events = [event for _ in range(2) for event in engine.stream(Request("a tale of", GREEDY, max_tokens=4))]
    told = [event.text for event in events if isinstance(event, Notice)]
    finished = [event for event in events if isinstance(event, Finished)]
    assert all(event.records["model"].answers >= 57 for event in finished)
    if not pays_from:
        assert not told
        return
    assert len(told) == 1 and told[0].startswith("Drafts of model are accepted 3")
    assert f"pay from {pays_from} on this machine: `edgespec adapt`" in told[0]
    assert all(event.records["model"].is_told for event in finished)


def test_measuring_leaves_the_sessions_usable(engine: Engine) -> None:
    engine.speculation = Speculation(("model",), 3)
    request = Request(CODE[4], GREEDY, max_tokens=20)
    expected = generate(engine, request)[1].tokens
    for seconds in (0.0, 0.2):
        profile = engine.measure(seconds)
        assert 1 in profile.rows and len(profile.rows) > 2
        assert all(0 < s < 10 for s in profile.rows.values())
        assert set(profile.drafts) == {"model"}, "lookups take no time"
        assert profile.drafts["model"].seconds(1) > 0 and profile.drafts["model"].read_s > 0
        assert generate(engine, request)[1].tokens == expected
    assert set(profile.rows) <= {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64}


@pytest.mark.parametrize("calls", [1, 4, 30])
def test_measuring_can_be_cancelled(engine: Engine, calls: int) -> None:
    engine.speculation = PLAIN
    request = Request(CODE[5], GREEDY, max_tokens=15)
    expected = generate(engine, request)[1].tokens
    with pytest.raises(Cancelled), cancellable(Alarm(calls)):
        engine.measure(5.0)
    assert generate(engine, request)[1].tokens == expected


@pytest.mark.parametrize("make", [hybrid, mamba])
def test_recurrent_target_and_draft(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    """A recurrent model drafting for itself under the autopilot: in step, and measured within its limits."""
    path = tmp_path / "model.gguf"
    make(path)
    engine = loaded(path, LoadOptions(threads=1, context_size=128), 2)
    request = Request(CODE[0], GREEDY, max_tokens=40)
    expected = generate(engine, request)[1].tokens
    profile = engine.measure(0.1)
    assert 1 in profile.rows and (make is mamba or max(profile.rows) <= 9), "the ring holds eight states"
    for kind in (*KINDS.values(), Speculation(("model",), 2)):
        engine.speculation, engine.draft_stats = kind, eager()
        finished = generate(engine, request)[1]
        assert finished.tokens == expected
        rate = finished.metrics.acceptance_rate
        if kind.draft_max is not None:
            assert rate is not None
        if "model" in kind.drafters and rate is not None:  # the autopilot drafts where the measured times say so
            assert rate > 0.9
    engine.close()


def test_a_context_of_a_few_tokens() -> None:
    """Measured in what room there is, and generated to its end."""
    engine = loaded(TARGET, LoadOptions(threads=1, context_size=16), 1)
    profile = engine.measure(0.05)
    assert 1 in profile.rows and max(profile.rows) <= 9 and profile.drafts == {}
    engine.speculation, engine.draft_stats = KINDS["ngram"], eager()
    events = [*engine.stream(Request("a = a + a + a", SamplingParams(temperature=0, logit_bias=((0, -1e3),))))]
    finished = events[-1]
    assert isinstance(finished, Finished) and finished.reason == "length"
    n = len(engine.encode("a = a + a + a"))
    assert len(finished.tokens) == 16 - n + 1
    decisions = [event.decision for event in events if isinstance(event, Step)]
    assert decisions[0] is None and all(each is not None for each in decisions[1:])
    engine.close()
