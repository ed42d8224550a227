"""The runner of a bench on the toy runtime: what is recorded, what is left out, what is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.bench.divergence import first_divergence
from edgespec.bench.prompt_sets import BenchPrompt
from edgespec.bench.records import Run
from edgespec.bench.runner import Bench, Skipped, list_arms
from edgespec.cancel import iterate
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, Request
from edgespec.errors import Cancelled
from edgespec.text.stream import Piece
from tests.engine.conftest import list_loaded

PROFILE = Profile(dict.fromkeys(range(1, 17), 0.001), {"model": DraftCost({1: 0.0001}, 0.00001)})
NAMES = ["plain", "autopilot", "ngram 2", "model 2", "autopilot cold"]


class Watched(Engine):
    """A toy engine that remembers requests and thinks aloud; `change` may change requests first."""

    def __init__(self, context_size: int = 512) -> None:
        target, draft = (load(name, LoadOptions(context_size=context_size)) for name in ("tree", "draft"))
        super().__init__(target, list_loaded(model=draft), Speculation(("ngram", "model")))
        self.seen: list[tuple[Speculation, DraftStats | None, Request]] = []
        self.change: Callable[[Request], Request] = lambda request: request
        self.draft_stats = self.known = DraftStats(PROFILE)

    def stream(self, request: Request) -> Iterator[Event]:
        self.seen.append((self.speculation, self.draft_stats, request))
        yield Piece("hm", "reasoning", "")
        yield from super().stream(self.change(request))


def bench(engine: Engine, *prompts: BenchPrompt, repeats: int = 1, temperatures: tuple[float, ...] = (0.0,)) -> Bench:
    return Bench(engine, list_arms(["ngram", "model"], [2]), prompts, temperatures, repeats, 6)


def recorded(running: Bench, profile: Profile = PROFILE) -> list[Run]:
    found = [*running.run(profile)]
    assert not [each for each in found if isinstance(each, Skipped)]
    return [each for each in found if isinstance(each, Run)]


def one(id_: str, *turns: str) -> BenchPrompt:
    return BenchPrompt(id_, "chat", turns or ("a tale",))


def test_each_drafter_is_an_arm_alone_and_the_autopilot_has_them_all() -> None:
    drafters = ("own-head", "ngram", "self")
    arms = list_arms(drafters, [2, 4])
    assert [(arm.name, arm.drafters, arm.gamma) for arm in arms] == [
        ("plain", (), 0),
        ("autopilot", drafters, None),
        *((f"{name} {gamma}", (name,), gamma) for name in drafters for gamma in (2, 4)),
        ("autopilot cold", drafters, None),
    ]
    assert [arm.name for arm in arms if arm.cold] == ["autopilot cold"]


def test_arms_are_interleaved_there_and_back() -> None:
    engine = Watched()
    running = bench(engine, one("a"), one("b"), repeats=2, temperatures=(0.0, 0.8))
    runs = recorded(running)
    assert len(runs) == running.runs == 40
    assert len(engine.seen) == 45, "each arm once before, to warm up"
    assert [(run.repeat, run.prompt, run.temperature, run.arm) for run in runs] == [
        (repeat, prompt, temperature, name)
        for repeat, names in ((0, NAMES), (1, NAMES[::-1]))
        for prompt in ("a/1", "b/1")
        for temperature in (0.0, 0.8)
        for name in names
    ]
    for speculation, _, request in engine.seen[5:]:
        drawn = speculation.draft_max is None and request.sampling.temperature == 0.8
        assert speculation.acceptance == ("block" if drawn else "sample")
        assert request.seed in (0, 1) and request.max_tokens == 6


def test_the_autopilot_learns_from_prompt_to_prompt_unless_it_is_cold() -> None:
    engine = Watched()
    recorded(bench(engine, one("a"), one("b")))
    pilots = [draft_stats for speculation, draft_stats, _ in engine.seen[5:] if speculation.draft_max is None]
    warm, cold = pilots[::2], pilots[1::2]
    assert warm[0] is warm[1] and len({id(each) for each in (warm[0], *cold, engine.known)}) == 4
    assert warm[0] is not engine.seen[1][1], "what it learned while warming up is forgotten"


@pytest.mark.parametrize("calls", [None, 40])
def test_what_the_engine_knew_before_is_left_as_it_was(calls: int | None) -> None:
    engine, left = Watched(), calls
    before = engine.known.to_dict()

    def check() -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                raise Cancelled

    running = iterate(bench(engine, one("a")).run(PROFILE), check)
    if calls is None:
        list(running)
    else:
        with pytest.raises(Cancelled):
            list(running)
    assert engine.draft_stats is engine.known and engine.known.to_dict() == before


def test_prompts_that_do_not_fit_are_left_out_also_the_first() -> None:
    engine = Watched(context_size=64)
    found = [*bench(engine, one("long", "x" * 100), one("a"), one("b", "y", "z" * 70), repeats=2).run(PROFILE)]
    skipped = [each for each in found if isinstance(each, Skipped)]
    assert [each.prompt for each in skipped] == ["long", "b"], "each once"
    assert all("the context holds 64" in each.reason for each in skipped)
    runs = [each.prompt for each in found if isinstance(each, Run)]
    assert (runs.count("a/1"), runs.count("b/1"), len(runs)) == (10, 1, 11)
    assert [*bench(engine, one("long", "x" * 100)).run(PROFILE)] == [Skipped("long", skipped[0].reason)]


def test_turns_see_the_answers_before_them() -> None:
    engine = Watched()
    runs = recorded(bench(engine, one("a", "a tale", " of", " two")))
    assert [run.prompt for run in runs[:3]] == ["a/1", "a/2", "a/3"]
    third = engine.seen[-1][2].prompt
    assert isinstance(third, tuple) and [message.role for message in third] == ["user", "assistant"] * 2 + ["user"]
    answers = [[*engine.stream(replace(engine.seen[-1][2], prompt=third[:n]))][-1] for n in (1, 3)]
    for said, finished in zip((third[1], third[3]), answers, strict=True):
        assert isinstance(finished, Finished)
        assert said.content == b"".join(engine.target.tokenizer.piece(t) for t in finished.tokens).decode()
    assert all(run.fork is None for run in runs)


def test_a_fork_is_looked_for_where_the_prompts_are_the_same() -> None:
    """An answer that parts is one fork; what follows it answers another text and can be compared with nothing."""
    engine = Watched()

    def parted(request: Request) -> Request:
        """The first answer is another one with fixed drafts."""
        if engine.speculation.draft_max != 2 or len(request.prompt) > 1:
            return request
        return replace(request, sampling=SamplingParams(temperature=0, logit_bias=((ord(" "), 30.0),)))

    engine.change = parted
    forks = {(run.arm, run.prompt): run.fork for run in recorded(bench(engine, one("a", "a tale", "o")))}
    for arm in NAMES:
        assert (forks[arm, "a/1"] is not None) == (arm in ("ngram 2", "model 2"))
        assert forks[arm, "a/2"] is None
    fork = forks["model 2", "a/1"]
    assert fork is not None and (fork.is_near_tie, fork.position) == (False, 0) and fork.gap > 0


@pytest.mark.parametrize("position", [0, 1])
def test_a_fork_is_found_after_a_prompt_of_one_token(position: int) -> None:
    session = load("tree", LoadOptions(context_size=64)).open_session()
    same = [ord("b")] * position
    fork = first_divergence(session, [ord("a")], [*same, ord("c")], [*same, ord("d")])
    assert fork is not None and fork.position == position


@pytest.mark.parametrize("drafters", [("ngram",), ("ngram", "model")])
def test_the_bound_is_the_rounds_by_the_profile(drafters: tuple[str, ...]) -> None:
    """Where all forwards take as long, it is their number and the drafted tokens, at plain decoding's speed."""
    flat = Profile(
        {1: 0.5, 16: 0.5}, {"model": DraftCost({1: 0.25})}
    )  # whatever lies between its points counts as well
    runs = recorded(Bench(Watched(), list_arms(drafters, [2]), [one("a")], (0.0,), 1, 60), flat)
    assert [run.arm for run in runs if run.bound_s is not None] == ["autopilot", "autopilot cold"]
    for run in (runs[1], runs[-1]):
        steps = run.bound_s / runs[0].metrics.tpot_s
        drafting = steps - run.metrics.target_forwards
        if drafters == ("ngram",):
            assert drafting == pytest.approx(0)
        else:
            assert 2 * drafting == pytest.approx(round(2 * drafting)), "half a step a drafted token"
