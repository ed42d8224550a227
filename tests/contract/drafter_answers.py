"""The Drafter contract through an engine: whatever happens to a drafter, the answer is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import Model
from edgespec.bench.divergence import first_divergence
from edgespec.cancel import Check, iterate
from edgespec.core.drafter import Drafter
from edgespec.core.peers import Yield
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import DrafterSpec, SlotResources
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, MemoryUse, Notice, Request
from edgespec.engine.structure import Structure, json_part
from edgespec.errors import Cancelled
from tests.contract.drafter_pair import make_cheap_stats
from tests.contract.drafter_subjects import Subject

PLAIN = Speculation((), 0)
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.8, top_k=40)
PROMPT = "for name in names:\n    print(name)\nfor name in names:\n    "
LONGER = PROMPT + "print(name)\n\n\nfor value in values:\n    "
OTHER = "values = [1, 2, 3, 1, 2, 3, 1, 2, 3, "
N = 16  # tokens of an answer

_FIELDS = {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["first", "second"]}}
STRUCTURE = Structure(
    (
        (
            "answer: ",
            json_part({"type": "object", "properties": _FIELDS, "required": [*_FIELDS], "additionalProperties": False}),
        ),
    )
)


@dataclass(frozen=True)
class Answer:
    """What an engine has said, and how. `notices` are those of drafters that failed, not of low acceptance."""

    tokens: tuple[int, ...]
    reason: str
    steps: list[Step]
    notices: list[str]
    reused: int

    @property
    def n_drafted(self) -> int:
        return sum(step.n_drafted for step in self.steps)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(step.n_drafted, step.n_accepted) for step in self.steps]


def collect(events: Sequence[Event | Yield]) -> Answer:
    (finished,) = [event for event in events if isinstance(event, Finished)]
    return Answer(
        finished.tokens,
        finished.reason,
        [event for event in events if isinstance(event, Step) and event.index],
        [event.text for event in events if isinstance(event, Notice) and event.text.startswith("The drafter ")],
        max((event.reused for event in events if isinstance(event, PrefillProgress)), default=0),
    )


@contextmanager
def open_engine(subject: Subject, *, is_adaptive: bool, slots: int = 1) -> Iterator[Engine]:
    """An engine with the drafter alone. Its models stay open."""
    speculation = Speculation((subject.drafter,)) if is_adaptive else Speculation((subject.drafter,), 3)
    engine = Engine(subject.target, [subject.loaded], speculation, slots, subject.memory)
    engine.draft_stats = make_cheap_stats(subject.drafter)
    try:
        yield engine
    finally:
        engine._slots.close()


def ask(
    engine: Engine, request: Request, speculation: Speculation | None = None, check: Check = lambda: None
) -> Answer:
    return collect(list(iterate(engine.generate(request, speculation), check)))


def make_request(prompt: str = PROMPT, sampling: SamplingParams = GREEDY, **options: Any) -> Request:
    """One whose seed is fixed, and whose answer does not end early. It uses the memory where there is one."""
    return Request(prompt, sampling, **{"max_tokens": N, "seed": 7, "memory": MemoryUse(), **options})


_PLAIN_ANSWERS: WeakKeyDictionary[Model, dict[Request, Answer]] = WeakKeyDictionary()


def ask_plainly(engine: Engine, request: Request) -> Answer:
    """What plain decoding says; it is asked once a model and request."""
    answers = _PLAIN_ANSWERS.setdefault(engine.target, {})
    if request not in answers:
        answers[request] = ask(engine, request, PLAIN)
    return answers[request]


def check_plain(engine: Engine, request: Request, found: Answer, *, is_exact: bool) -> None:
    """`found` is what plain decoding says."""
    check_same_text(engine, request, found, ask_plainly(engine, request), is_exact=is_exact)


def check_same_text(engine: Engine, request: Request, found: Answer, wanted: Answer, *, is_exact: bool) -> None:
    """On a runtime with rounding greedy texts may part at a near tie."""
    if found.tokens == wanted.tokens:
        return
    assert not is_exact and request.sampling == GREEDY, (found.tokens, wanted.tokens)
    session = engine.target.open_session()
    assert isinstance(request.prompt, str)
    fork = first_divergence(session, engine.encode(request.prompt), wanted.tokens, found.tokens)
    session.close()
    assert fork is not None and fork.is_near_tie, fork


def says_what_plain_decoding_says(subject: Subject) -> None:
    """By chains and trees of a fixed length and adaptively; greedily and drawn with a seed."""
    for is_adaptive in (False, True):
        with open_engine(subject, is_adaptive=is_adaptive) as engine:
            for sampling in (GREEDY, DRAWN):
                specs = [engine.speculation]
                if not is_adaptive:
                    specs.append(Speculation((subject.drafter,), 2, 6))
                drafted = 0
                for spec in specs:
                    for prompt in (PROMPT, OTHER):
                        request = make_request(prompt, sampling)
                        answer = ask(engine, request, spec)
                        check_plain(engine, request, answer, is_exact=subject.is_exact)
                        assert not answer.notices
                        drafted += answer.n_drafted
                assert drafted, (is_adaptive, sampling)


def serves_every_rule(subject: Subject) -> None:
    """A drafter that can draw is verified by the drawn rules; test_drafters.py has their distribution."""
    for rule in ("rejection", "block") if subject.loaded.spec.draws else ():
        for draft_max in (3, None):
            with open_engine(subject, is_adaptive=draft_max is None) as engine:
                spec = Speculation((subject.drafter,), draft_max, acceptance=rule)
                seeds = (1, 1, 2) if subject.is_exact else (1,)
                answers = [ask(engine, make_request(PROMPT, DRAWN, seed=seed), spec) for seed in seeds]
                if subject.is_exact and draft_max is not None:  # the autopilot has learned meanwhile
                    assert answers[0].tokens == answers[1].tokens
                assert sum(answer.n_drafted for answer in answers) and not any(each.notices for each in answers)


def survives_other_texts(subject: Subject) -> None:
    """Prompts that continue the last text, go back in it, or have nothing to do with it, on one slot."""
    for is_adaptive in (False, True):
        with open_engine(subject, is_adaptive=is_adaptive) as engine:
            for prompt in (PROMPT, LONGER, PROMPT, OTHER, PROMPT[:-20], LONGER):
                request = make_request(prompt, max_tokens=24)  # lookups on the toy find nothing earlier
                with_drafts = ask(engine, request)
                assert with_drafts.n_drafted and not with_drafts.notices
                check_plain(engine, request, with_drafts, is_exact=subject.is_exact)


def survives_structure(subject: Subject) -> None:
    """A grammar forces some rounds, which the drafter only hears of."""
    for is_adaptive in (False, True):
        with open_engine(subject, is_adaptive=is_adaptive) as engine:
            request = make_request(structure=STRUCTURE, max_tokens=60)
            answer = ask(engine, request)
            sources = {step.decision.drafter for step in answer.steps if step.decision is not None}
            assert "structure" in sources and not answer.notices
            check_plain(engine, request, answer, is_exact=subject.is_exact)
            after = ask(engine, make_request())
            assert after.n_drafted and not after.notices


class Alarm:
    """A check that raises Cancelled at its n-th call, once; it counts its calls."""

    def __init__(self, calls: int = 0) -> None:
        self._at = calls
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self._at:
            raise Cancelled


def is_head(subject: Subject) -> bool:
    return subject.loaded.spec.needs == "head"


def survives_cancels(subject: Subject) -> None:
    """Cancelled between any two operations, the next answer is drafted like an undisturbed one."""
    n_cancels = 8 if "toy" in subject.name else 3
    for is_adaptive in (False, True):
        with open_engine(subject, is_adaptive=is_adaptive) as engine:
            request = make_request(LONGER)
            counter = Alarm()
            wanted = ask(engine, request, check=counter)
            for calls in spread(counter.calls, n_cancels):
                cancelled = ask(engine, make_request(PROMPT), check=Alarm(calls))
                assert not cancelled.notices, (calls, cancelled.notices)
                answer = ask(engine, request)
                assert not answer.notices, (calls, answer.notices)
                assert answer.tokens == wanted.tokens or not subject.is_exact, calls
                assert answer.n_drafted
                if subject.is_exact and not is_adaptive:
                    assert answer.sizes == wanted.sizes or subject.tolerance or subject.memory is not None, calls


def spread(n: int, most: int) -> list[int]:
    """Up to `most` numbers from 1 to `n`, the first ones among them."""
    return sorted({*range(1, min(n, most // 2) + 1), *(1 + i * n // most for i in range(most))})


def survives_adoption(subject: Subject) -> None:
    """A second generation begins beside the first, from the prefix that it has read where the runtime can share it."""
    with open_engine(subject, is_adaptive=True, slots=2) as engine:
        beginning = LONGER * 4 if "llama.cpp" in subject.name else LONGER  # too few tokens are not copied
        first, second = make_request(beginning, max_tokens=3 * N), make_request(beginning + "print(value)\n")
        running = engine.generate(first)
        events: list[Event | Yield] = []
        while sum(isinstance(event, Step) for event in events) < 4:
            events.append(next(running))
        beside = ask(engine, second)
        answer = collect([*events, *running])
        assert not answer.notices and not beside.notices
        assert answer.n_drafted and beside.n_drafted
        cannot_adopt = "toy-recurrent" in subject.name or is_head(subject)  # its hidden states are not copied
        assert beside.reused > len(engine.encode(beginning)) - 3 or cannot_adopt
        check_plain(engine, first, answer, is_exact=subject.is_exact)
        check_plain(engine, second, beside, is_exact=subject.is_exact)


METHODS = ("begin", "pending_tokens", "expand", "a unit of expand", "draft_async", "observe", "close")


def break_once(spec: DrafterSpec, method: str, calls: int) -> tuple[DrafterSpec, list[str]]:
    """`spec` whose drafters raise at the `calls`-th call of `method`, once; and a list that then has an entry."""
    raised: list[str] = []
    left = calls

    def fall_due() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raised.append(method)
            raise RuntimeError("broken on purpose")

    def open_broken(resources: SlotResources) -> Drafter:
        drafter = spec.open(resources)
        original: Callable[..., Any] = getattr(drafter, method.split()[-1])

        def call(*arguments: Any) -> Any:
            fall_due()
            return original(*arguments)

        def expand(*arguments: Any) -> Iterator[None]:
            for unit in original(*arguments):
                fall_due()
                yield unit

        setattr(drafter, method.split()[-1], call if method == method.split()[-1] else expand)
        return drafter

    return replace(spec, open=open_broken), raised


def survives_errors(subject: Subject) -> None:
    """An exception in any method costs the proposals of the generation; it is said once, and the next one drafts."""
    request, seen = make_request(max_tokens=12), set()
    with open_engine(subject, is_adaptive=False) as engine:
        wanted = ask_plainly(engine, request)
    most = 4 if "toy" in subject.name else 2
    for method, calls in product(METHODS, range(1, most + 1)):
        is_adaptive = calls % 2 == 1
        spec, raised = break_once(subject.loaded.spec, method, calls)
        with open_engine(subject.replaced(spec), is_adaptive=is_adaptive) as engine:
            if not is_adaptive and method != "draft_async":
                engine.speculation = Speculation((subject.drafter,), 2, 6)  # trees are never left unread
            answers = [ask(engine, request)]
            while not raised and len(answers) < calls:
                answers.append(ask(engine, request))
            answers.append(ask(engine, request))
            for answer in answers:
                check_same_text(engine, request, answer, wanted, is_exact=subject.is_exact)
            assert answers[-1].n_drafted, (method, calls)
            notices = [notice for answer in answers for notice in answer.notices]
            is_told = bool(raised) and method != "close"
            assert len(notices) == is_told, (method, calls, notices)
            assert not is_told or f"The drafter {subject.drafter} failed" in notices[0]
        seen |= set(raised)
    assert {"begin", "expand", "a unit of expand", "draft_async", "observe"} <= seen, seen
    assert "pending_tokens" in seen or subject.loaded.spec.needs in ("nothing", "memory")
