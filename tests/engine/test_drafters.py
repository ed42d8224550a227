"""Any number of drafters in one engine: together, some of them, none; and what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgespec.autopilot.profile import DraftCost
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import open_model
from edgespec.backends.attached_draft import parse
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.cancel import cancellable
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.errors import Cancelled, DraftRefused
from edgespec.models.drafts import DrafterPlan
from tests.core.toys import Alarm
from tests.engine.conftest import PLAIN, generate, list_loaded
from tests.engine.packages import ADAPTIVE, FIXED, GREEDY, TALE, Faults, Flaky, add_package, answer, cheap, open_toy
from tests.engine.prompts import CODE
from tests.gguf_models import DRAFT, TARGET


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Lookups, a draft model and a self-draft, in the mode whose results do not depend on the number of rows."""
    options = LoadOptions(threads=1, context_size=512, exact=True)
    target, draft = (open_model("llamacpp", path, options) for path in (TARGET, DRAFT))
    method = parse("layerskip:2")
    assert method is not None
    folder = tmp_path_factory.mktemp("drafts")
    attached = target.make_self_draft(method, folder=folder)
    opened = Engine(target, list_loaded(model=draft, self=attached), PLAIN)
    yield opened
    opened.close()


THREE = ("ngram", "model", "self")
TOGETHER = {
    "chain": Speculation(THREE, 3),
    "tree": Speculation(THREE, 3, 9),
    "other order": Speculation(THREE[::-1], 2, 7),
    "autopilot": Speculation(THREE),
}


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.95)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("way", TOGETHER)
def test_several_together_give_plain_decodings_text(trio: Engine, way: str, sampling: SamplingParams) -> None:
    trio.draft_stats = cheap("model", "self")
    drafters: set[str] = set()
    origins: set[str] = set()
    accepted = 0
    for seed, prompt in enumerate(CODE[:3]):
        request = Request(prompt, sampling, max_tokens=40, seed=seed)
        expected = answer(trio, request, PLAIN).tokens
        found = answer(trio, request, TOGETHER[way])
        assert found.tokens == expected
        assert not any("left out" in notice for notice in found.notices)
        accepted += sum(step.n_accepted for step in found.steps)
        drafters |= found.drafters
        origins |= found.origins
    assert accepted > 10
    if way == "chain":
        assert drafters == {"ngram", "model"}, "the first that proposes anything"
        return
    assert drafters == set(THREE)
    assert any("+" in origin for origin in origins), "tokens that several have proposed"
    assert {name for origin in origins for name in origin.split("+")} <= set(THREE)


def test_a_request_may_ask_for_fewer_drafters() -> None:
    engine = open_toy()
    engine.speculation = Speculation(("ngram", "model"), 3, 9)
    expected = answer(engine, TALE, PLAIN)
    assert expected.drafters == set()
    requests = {
        ("ngram",): Speculation(("ngram",), 4),
        ("model",): Speculation(("model",), 4),
        ("ngram", "model"): None,
    }
    for names, speculation in requests.items():
        found = answer(engine, TALE, speculation)
        assert found.tokens == expected.tokens and found.drafters == set(names)
    assert answer(engine, TALE, Speculation(("ngram",))).drafters == {"ngram"}
    assert engine.speculation == Speculation(("ngram", "model"), 3, 9)
    assert len(engine._slots._kept) == 1, "one cache has served all"
    engine.close()


@pytest.mark.parametrize("name", ["model", "self", "nonsense"])
@pytest.mark.parametrize("length", [FIXED, ADAPTIVE])
def test_a_drafter_that_is_not_loaded_is_refused(name: str, length: int | None) -> None:
    engine = Engine(load("tree", LoadOptions()), list_loaded(), PLAIN)
    engine.draft_stats = cheap()
    expected = answer(engine, TALE)
    with pytest.raises(DraftRefused, match=f"the drafter '{name}' is not loaded") as caught:
        answer(engine, TALE, Speculation(("ngram", name), length))
    assert caught.value.hint
    assert answer(engine, TALE).tokens == expected.tokens
    assert answer(engine, TALE, Speculation((name,), 0)).tokens == expected.tokens, "nobody has to draft"
    engine.close()


def test_what_is_measured() -> None:
    """Those that take time and work; what was known is kept when a drafter joins."""
    broken, working = Faults("expand", 1000), Faults("none", 0)
    packages = [
        add_package("broken", lambda resources: Flaky(broken, "broken")),
        add_package("working", lambda resources: Flaky(working, "working")),
    ]
    engine = open_toy(*packages)
    profile = engine.measure(0.05)
    assert set(profile.drafts) == {"model", "working"} and 1 in profile.rows
    assert all(cost.seconds(1) > 0 and cost.read_s >= 0 for cost in profile.drafts.values())
    known = DraftCost({1: 123.0}, 4.0)
    engine.draft_stats = DraftStats(replace(profile, drafts={"working": known}))
    with pytest.raises(Cancelled), cancellable(Alarm(1)):
        engine.measure_missing()
    assert set(engine.draft_stats.costs.profile.drafts) == {"working"}
    engine.measure_missing()
    found = engine.draft_stats.costs.profile
    assert set(found.drafts) == {"model", "working"} and found.drafts["working"] == known
    assert found.rows == profile.rows and 0 < found.drafts["model"].seconds(1) < 100
    assert generate(engine, TALE)[1].tokens == answer(engine, TALE, Speculation(("model",), 3)).tokens
    engine.close()


@pytest.mark.parametrize("kind", ["tree", "linear"])
def test_the_tokens_of_a_tree_bound_a_longer_path_too(kind: str) -> None:
    drafted = LoadedDrafter(DrafterPlan(drafter_specs()["model"]), load("draft", LoadOptions(context_size=512)))
    engine = Engine(load(kind, LoadOptions(context_size=512)), [drafted], Speculation(("model",), 7, 3))
    request = Request("hello", SamplingParams(temperature=0), 30)
    drafts = [event.n_drafted for event in engine.stream(request) if isinstance(event, Step) and event.index]
    assert max(drafts) == 3
    engine.close()
