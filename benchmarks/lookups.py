"""Lookups and a draft model or head, alone and together: tau, acceptance, speed over plain decoding, time of drafting.

    uv run python -m benchmarks.lookups [--target T.gguf] [--arm ngram --arm recycling --arm ngram+recycling] \
        [--draft D.gguf] [--prompts 20] [--chat QUESTIONS.jsonl] [--per-category 1] [--tokens 96] [--repeats 3] \
        [--threads 1] [--temperature 0] [--memory] [--exact] [--curve 250:1=1,2=1.7,4=1.27,8=2.47,16=3.46] [--unit 0.1]

Arms run in turn on each prompt, in reverse order on every second one, each with statistics of its own, after a warm-up
text. An arm is drafters joined by '+' for the autopilot; ":4" and ":4/7" behind them are a chain and a tree of fixed
size. "x plain" and "x first" are geometric means over prompts of the ratio of tokens/s to plain decoding and to the
first arm. A prompt's ratio is the median over the repeats. tau is tokens a round; "accepted" is the share of verified
draft tokens; "draft_us" is the median time of a round for the sake of drafts. --curve gives the milliseconds of a plain
step, and the plain steps of forwards by their rows. Forwards are then charged with these times, and the autopilot
believes them. The time of drafting is the measured one, but in arms with --draft where --unit gives the plain steps of
its forward. In arms a draft model is called "model", a head by its kind. With --memory each arm remembers the texts of
the prompts before; repeats then recite. Rounding depends on the rows of a forward, so arms differ in some texts ("same"
counts those that plain decoding has too). With --exact all have the same, from slower forwards. stdout ends with one
JSON line.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import MODEL_PATH, PLAIN, TARGET, list_drafters, load_model, print_result
from benchmarks.heads import fits, open_head
from benchmarks.promise import take_in_turn
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedHead
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import CATEGORIES, read_prompts, take_per_category
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.registry import drafter_specs
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, MemoryUse, Prompt, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.formats.head_file import read_head
from edgespec.memory.memory import Memory
from edgespec.models.drafts import DrafterPlan
from edgespec.text.chat_template import Message

ARMS = ("ngram", "recycling", "ngram+recycling")


class FixedCosts(CostModel):
    """Costs that no measurement changes, but those of drafters that are not in the profile."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, self.profile.seconds(rows))

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None:
        if drafter not in self.profile.drafts:
            super().observe_drafting(drafter, seconds, expected_s)


@dataclass
class Arm:
    """One way to draft, with what it has learned; `speeds` are tokens/s by prompt."""

    name: str
    speculation: Speculation
    stats: DraftStats
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[Step] = field(default_factory=list)
    same: int = 0


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, help="A draft model or head.")
@click.option("--arm", "names", multiple=True, default=ARMS, show_default=True)
@click.option("--prompts", "n", type=click.IntRange(1), default=20, show_default=True)
@click.option("--category", "categories", multiple=True, type=click.Choice(CATEGORIES), help="[default: all]")
@click.option("--chat", type=MODEL_PATH, help="Questions in JSONL, of which some of each category are asked.")
@click.option("--per-category", type=click.IntRange(1), default=1, show_default=True, help="Questions of --chat.")
@click.option("--tokens", type=click.IntRange(4), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--context", default=4096, show_default=True, help="Prompts that do not fit are left out.")
@click.option("--curve", callback=lambda _, __, text: parse_curve(text), help="Costs of forwards, not measured.")
@click.option("--unit", type=click.FloatRange(0, min_open=True), help="With --curve: the cost of --draft.")
@click.option("--memory", is_flag=True, help="Let each arm remember the texts of earlier prompts.")
@click.option("--exact", is_flag=True, help="Give all arms the same texts, as --exact of edgespec.")
def main(
    target: Path,
    draft: Path | None,
    names: Sequence[str],
    n: int,
    categories: Sequence[str],
    chat: Path | None,
    per_category: int,
    tokens: int,
    repeats: int,
    threads: int,
    temperature: float,
    context: int,
    curve: Profile | None,
    unit: float | None,
    memory: bool,
    exact: bool,
) -> None:
    """Compare drafters with plain decoding, and with the first of them."""
    options = LoadOptions(threads=threads, context_size=context, exact=exact)
    model = load_model("llamacpp", target, options)
    source = load_draft(model, draft, options) if draft is not None else None
    loaded = load_drafters(source, names)
    folder = tempfile.TemporaryDirectory()
    engine = Engine(model, loaded, PLAIN, memory=Memory(Path(folder.name), "benchmark", 2**26) if memory else None)
    if curve is not None and unit is not None:
        curve = Profile(curve.rows, {name_draft(source): DraftCost({1: unit * curve.seconds(1)})})
    profile = curve or engine.measure(2.0)
    arms = [make_arm(name, profile, is_fixed=curve is not None) for name in ("plain", *names)]
    prompts = [each for each in list_prompts(n, categories, chat, per_category) if fits(engine, each, context - tokens)]
    sampling = SamplingParams(temperature=temperature)
    for turn in range(repeats + 1):  # the first one is the warm-up
        for i, prompt in enumerate(prompts if turn else prompts[:1]):
            request = Request(prompt, sampling, tokens, i)
            run_arms(engine, arms[:: 1 if (turn + i) % 2 else -1], str(i), request, curve)
        if not turn:
            for arm in arms:
                arm.speeds.clear()
                arm.steps.clear()
                arm.same = 0
    rows = [summarize(arm, arms[0], arms[1]) for arm in arms]
    for row in rows:
        click.echo(str(row), err=True)
    engine.close()
    folder.cleanup()
    said = {"tokens": tokens, "repeats": repeats, "temperature": temperature, "prompts": len(prompts)}
    print_result("lookups", {**said, "arms": rows}, *filter(None, (target, draft)))


def list_prompts(n: int, categories: Sequence[str], chat: Path | None, per_category: int) -> list[Prompt]:
    """`n` shipped texts, or questions of a file, `per_category` of each at most."""
    if chat is None:
        return [each.turns[0] for each in take_in_turn(n, categories)]
    return [(Message("user", each.turns[0]),) for each in take_per_category(read_prompts(chat), per_category)[:n]]


def load_draft(target: Model, path: Path, options: LoadOptions) -> Model | AttachedHead:
    return load_model("llamacpp", path, options) if read_head(path) is None else open_head(target, path)


def name_draft(source: Model | AttachedHead | None) -> str:
    """The drafter of a draft model, or of a head."""
    return source.name if isinstance(source, AttachedHead) else "model"


def load_drafters(source: Model | AttachedHead | None, names: Sequence[str]) -> list[LoadedDrafter]:
    """All that the arms `names` ask for; `source` is the draft model or head."""
    asked = dict.fromkeys(word for name in names for word in name.partition(":")[0].split("+"))
    name = name_draft(source)
    trained = [] if source is None else [LoadedDrafter(DrafterPlan(drafter_specs()[name]), source)]
    return [*list_drafters([each for each in asked if each != name]), *trained]


def parse_curve(text: str | None) -> Profile | None:
    """ "35:1=1,2=1.9" is a forward of 35 ms for one row, and of 1.9 times that for two."""
    if text is None:
        return None
    plain_ms, _, points = text.partition(":")
    pairs = [point.split("=") for point in points.split(",")]
    return Profile({int(rows): float(plain_ms) / 1e3 * float(steps) for rows, steps in pairs})


def make_arm(name: str, profile: Profile, *, is_fixed: bool) -> Arm:
    if name == "plain":
        return Arm(name, PLAIN, DraftStats(profile))
    words, _, size = name.partition(":")
    depth, _, nodes = size.partition("/")
    speculation = Speculation(tuple(words.split("+")), int(depth) if depth else None, int(nodes) if nodes else None)
    stats = DraftStats(deepcopy(profile))
    if is_fixed:
        stats.costs = FixedCosts(profile)
    return Arm(name, speculation, stats)


def run_arms(engine: Engine, arms: Sequence[Arm], prompt: str, request: Request, curve: Profile | None) -> None:
    texts = {}
    for arm in arms:
        engine.speculation, engine.draft_stats = arm.speculation, arm.stats
        steps: list[Step] = []
        for event in engine.stream(replace(request, memory=MemoryUse(arm.name))):
            if isinstance(event, Step) and event.index:
                steps.append(event)
            elif isinstance(event, Finished):
                speed = event.metrics.tokens_per_second if curve is None else measure_speed(arm, steps, curve)
                arm.speeds[prompt].append(speed or 0.0)
                texts[arm.name] = event.tokens
        arm.steps += steps
    for arm in arms:
        arm.same += texts[arm.name] == texts["plain"]


def measure_speed(arm: Arm, steps: Sequence[Step], curve: Profile) -> float | None:
    """Tokens per second by the curve; plain decoding has no time for the sake of drafts.

    A draft with a price is charged for each unit, of which a fixed length takes one for each token on a path. Lookups
    beside it are free then.
    """
    seconds = 0.0
    priced = curve.drafts.keys() & set(arm.speculation.drafters or ())
    for step in steps:
        seconds += curve.seconds(step.n_drafted + 1)
        for name in priced:
            drafted = step.decision.drafted if step.decision is not None else {}
            n = drafted.get(name, 0) if arm.speculation.draft_max is None else arm.speculation.draft_max
            seconds += n * curve.drafts[name].units[1]
        if not priced and not arm.speculation.is_plain:
            seconds += step.draft_s
    return sum(len(step.tokens) for step in steps) / seconds if steps else None


def summarize(arm: Arm, plain: Arm, first: Arm) -> dict[str, Any]:
    def ratios(other: Arm) -> list[float]:
        pairs = {key: (arm.speeds[key], other.speeds[key]) for key in arm.speeds}
        return [statistics.median(a / b for a, b in zip(*each, strict=True) if b) for each in pairs.values()]

    sources = Counter(step.decision.drafter for step in arm.steps if step.decision and step.n_drafted)
    tested = sum(step.n_drafted for step in arm.steps)
    return {
        "arm": arm.name,
        "tau": round(sum(len(step.tokens) for step in arm.steps) / len(arm.steps), 3),
        "accepted": round(sum(step.n_accepted for step in arm.steps) / tested, 3) if tested else None,
        "rows": round(1 + tested / len(arm.steps), 2),
        "x plain": round(statistics.geometric_mean(ratios(plain)), 3),
        "x first": round(statistics.geometric_mean(ratios(first)), 3),
        "worst": round(min(ratios(plain)), 2),
        "draft_us": round(statistics.median(step.draft_s for step in arm.steps) * 1e6),
        "verify_us": round(statistics.median(step.verify_s for step in arm.steps) * 1e6),
        "same": arm.same,
        "sources": dict(sources.most_common(6)),
    }


if __name__ == "__main__":
    main()
