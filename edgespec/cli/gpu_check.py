"""`edgespec doctor --gpu`: the embedded pair on the user's device, wherever its layers and caches are, with drafts and
without; a report of figures that can be attached to an issue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.api.options import build_load_config
from edgespec.bench.divergence import first_divergence
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.bench.verify import Case, choose_arms, sum_up
from edgespec.cli.engine import open_engine
from edgespec.cli.interrupts import interruptible
from edgespec.cli.verify import run_cases
from edgespec.client.local import LocalEngine
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Finished, Request
from edgespec.errors import Cancelled, EdgespecError
from edgespec.models.registry import EMBEDDED_ALIAS
from edgespec.progress import QUIET
from edgespec.text.chat_template import Message

_TOKENS = 24  # tokens of an answer
_TIE = 0.5  # the difference of two logits up to which kernels that round otherwise may choose another token
_DRAFT = "ngram+model+layerskip:4"
PLACES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "llamacpp": {
        "default": {},
        "some layers": {"gpu_layers": 3},
        "the draft on the host": {"gpu_layers_draft": 0},
        "a quantized cache": {"kv_type": "q8_0"},
        "without flash attention": {"flash_attention": False},
    },
    "mlx": {"default": {}},
}


@dataclass(frozen=True, slots=True)
class PlaceCheck:
    """What became of the answers in one place.

    as_on_host  number of plain answers that are the same as on the processor; `widest_gap` is the largest difference of
                two logits where others part from them. Other types of cache and MLX are not compared
    as_plain    number of the `drafted` answers that are those of plain decoding, or part from them at a near-tie
    step_ms     milliseconds of a forward, by its rows
    error       why nothing could be checked
    """

    backend: str
    place: str
    answers: int = 0
    as_on_host: int | None = None
    widest_gap: float = 0.0
    as_plain: int = 0
    drafted: int = 0
    step_ms: Mapping[int, float] | None = None
    error: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return not self.error and 0 < self.drafted == self.as_plain and self.widest_gap <= _TIE

    def format(self) -> str:
        if self.error:
            return f"{self.place}: {self.error}"
        told = [f"{self.as_plain} of {self.drafted} drafted answers as plain decoding"]
        if self.as_on_host is not None:
            told.insert(0, f"{self.as_on_host} of {self.answers} as on the processor, gaps to {self.widest_gap:.2g}")
        if self.step_ms:
            told.append(f"a step {self.step_ms[1]:.2f} ms")
        return f"{self.place}: {', '.join(told)}{'' if self.is_sound else '; DIFFERENT'}"

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "is_sound": self.is_sound}


def check_places(backends: Sequence[str], begin: Callable[[str], None]) -> Iterator[PlaceCheck]:
    """Check each place of the runtimes; `begin` is told of each before its check. Raises Cancelled."""
    for backend in (each for each in PLACES if each in backends):
        with ExitStack() as opened:
            compare = None
            if backend == "llamacpp":
                begin(f"{backend}, the processor")
                try:
                    host = opened.enter_context(closing(_open(backend, {"gpu_layers": 0})))
                except EdgespecError as error:
                    yield PlaceCheck(backend, "the processor", error=error.message)
                    continue
                compare = partial(_compare, host, _answer_all(host))
            for place, options in PLACES[backend].items():
                begin(f"{backend}, {place}")
                try:
                    with closing(_open(backend, options)) as local:
                        yield _check_place(backend, place, local, None if "kv_type" in options else compare)
                except EdgespecError as error:
                    yield PlaceCheck(backend, place, error=error.message)


def _open(backend: str, options: Mapping[str, Any]) -> LocalEngine:
    settings = {"backend": backend, "draft": _DRAFT, "ctx": 512, **options}
    return open_engine(build_load_config(EMBEDDED_ALIAS, settings), reporter=QUIET)


def _compare(host: LocalEngine, wanted: Sequence[Finished], local: LocalEngine) -> tuple[int, float]:
    """Returns (number of plain answers of `local` that are those of `host`, largest difference of two logits where
    others part from them).
    """
    here, gaps, same = host.require_loaded().engine, [0.0], 0
    with closing(here.target.open_session()) as session:
        for text, one, other in zip(_texts(), wanted, _answer_all(local), strict=True):
            same += one.tokens == other.tokens
            fork = first_divergence(session, here.encode(text), one.tokens, other.tokens)
            gaps.append(fork.gap if fork is not None else 0.0)
    return same, max(gaps)


def _check_place(
    backend: str, place: str, local: LocalEngine, compare: Callable[[LocalEngine], tuple[int, float]] | None
) -> PlaceCheck:
    loaded = local.require_loaded()
    same, gap = compare(local) if compare is not None else (None, 0.0)
    cases = [Case(f"text {i}", "code", GenerationSpec((Message("user", text),))) for i, text in enumerate(_texts())]
    arms = choose_arms(loaded.info.speculation.drafters)
    outcomes, is_whole = run_cases(local, cases, arms, _TOKENS)
    if not is_whole:
        raise Cancelled
    drafted = [each for each in outcomes if each.arm != arms[0].name]
    row = sum_up(drafted, [each for each in outcomes if each.arm == arms[0].name], ())
    rows = loaded.engine.draft_stats.costs.profile.rows
    return PlaceCheck(
        backend=backend,
        place=place,
        answers=len(cases),
        as_on_host=same,
        widest_gap=gap,
        as_plain=row.answers - row.faults,
        drafted=row.answers,
        step_ms={n: 1000 * seconds for n, seconds in sorted(rows.items())},
    )


def _texts() -> list[str]:
    return [each.turns[0] for each in read_shipped_prompts(["code_completion"])][:4]


def _answer_all(local: LocalEngine) -> list[Finished]:
    """The last events of plain, greedy answers to all texts. Raises Cancelled."""
    local.speculate("off").result()
    requests = [Request(text, SamplingParams(temperature=0.0), _TOKENS) for text in _texts()]
    ends = [end for each in requests for end in interruptible(local.stream(each)) if isinstance(end, Finished)]
    local.speculate("on").result()
    if any(end.reason == "cancelled" for end in ends):
        raise Cancelled
    return ends
