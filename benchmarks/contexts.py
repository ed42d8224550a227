"""Long contexts: the time of bare forwards by rows, and the autopilot against plain decoding, at each length.

    uv run python -m benchmarks.contexts --target T.gguf --draft D.gguf --method sparse:4,256 --context 8000

To read a long text takes minutes to hours on a CPU. So the context before a prompt is filled with copies of cells of
random tokens. The prompt's rows do not attend to them: they are another sequence's. llama.cpp computes attention over
all cells and masks those of other sequences. So forwards take the time of the long context, at its positions. The text
is that after the prompt alone, since rotary embeddings depend on distances only. Drafters see the random tokens as the
beginning of the text. Flash attention is off: it skips masked cells, and is slower on CPUs.

Arms run in turn and back again (A B B A) on one session. A ratio is the speed over that of plain decoding of the same
text in the same turn. Each arm keeps its statistics from text to text. llama.cpp only. stdout ends with one JSON line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np

from benchmarks.harness import DRAFT, MODEL_PATH, TARGET, list_loaded, load_model, print_result
from benchmarks.selfdrafts import COPIES, open_self_draft
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.profiler import measure_contexts, measure_drafters, measure_rows
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.long_context import extend_cache
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.core.decoding import read_prompt
from edgespec.core.drafter import Drafter
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Controller, Session, Step
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.drafters import SlotMemory
from edgespec.engine.drafting import make_adaptive_controller, make_draw, make_verifier

MAX_PROMPT = 512  # tokens
COMPUTED = 512  # tokens that are read before they are copied
RULE: Final = "sample"


@dataclass
class Arm:
    """Drafters with statistics of their own; none for plain decoding.

    `runs` are [turns] (seconds a token, tokens a round, seconds a token of drafting and deciding).
    """

    name: str
    drafters: Sequence[Drafter]
    stats: DraftStats
    runs: list[tuple[float, float, float]] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)  # drafted rounds by who drafted


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT, help="[default: the embedded draft]")
@click.option("--method", default="sparse:4,256", show_default=True, help="The self-draft.")
@click.option("--context", "contexts", multiple=True, type=click.IntRange(64), default=(1024, 8000), show_default=True)
@click.option("--category", default="code_completion", show_default=True, help="Of the shipped prompts.")
@click.option("--texts", "n_texts", type=click.IntRange(1), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(4), default=64, show_default=True)
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Turns, there and back, of each text."
)
@click.option("--seconds", type=float, default=10.0, show_default=True, help="For measuring bare forwards.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--costs-only", is_flag=True, help="Measure bare forwards alone.")
def main(
    target: Path,
    draft: Path,
    method: str,
    contexts: tuple[int, ...],
    category: str,
    n_texts: int,
    tokens: int,
    repeats: int,
    seconds: float,
    temperature: float,
    threads: int,
    costs_only: bool,
) -> None:
    """Measure at each CONTEXT."""
    size = max(contexts) + MAX_PROMPT + tokens + 64
    options = LoadOptions(context_size=size, threads=threads, flash_attention=False)
    model = load_model("llamacpp", target, options)
    session = model.open_session()
    assert isinstance(session, LlamaSession)
    sources: dict[str, Model | AttachedDraft] = {}
    if not costs_only:
        sources = {"model": load_model("llamacpp", draft, options), "self": open_self_draft(model, method, COPIES)}
    with ExitStack() as undo:
        arms = open_arms(model, session, sources, undo)
        profile = measure(session, [each for arm in arms for each in arm.drafters], sources, contexts, seconds)
        costs = {n: {m: profile.seconds(m, n) for m in (1, 2, 4, 8, 16)} for n in (0, *contexts)}
        for n, by_rows in costs.items():
            click.echo(f"{n:6}  " + "  ".join(f"{m}: {s * 1e3:.1f} ms" for m, s in by_rows.items()), err=True)
        results: list[dict[str, Any]] = []
        for n in contexts if not costs_only else ():
            for arm in arms:
                arm.stats, arm.runs, arm.sources = DraftStats(profile), [], {}
            with fill(session, n) as filler:
                for prompt in read_shipped_prompts([category])[:n_texts]:
                    text = [*filler, *model.tokenizer.encode(prompt.turns[0], parse_special=False)[-MAX_PROMPT:]]
                    for repeat in range(2 * repeats):
                        for arm in arms if repeat % 2 == 0 else reversed(arms):
                            run(arm, session, text, tokens, temperature, seed=repeat // 2)
            results += [summarize(arm, arms[0], n) for arm in arms[1:]]
    settings: dict[str, Any] = {
        "tokens": tokens,
        "texts": n_texts,
        "repeats": repeats,
        "threads": threads,
    }
    settings |= {"temperature": temperature, "method": method, "category": category}
    print_result("contexts", {**settings, "seconds": costs, "arms": results}, target)


def open_arms(model: Model, session: Session, sources: dict[str, Model | AttachedDraft], undo: ExitStack) -> list[Arm]:
    """Plain decoding, then the autopilot with lookups alone, with each of `sources`, and with all of them."""
    loaded = {each.spec.name: each for each in list_loaded(**sources)}
    vocab_size, unknown = model.tokenizer.vocab_size, DraftStats(Profile({1: 1.0}))
    arms = [Arm("plain", (), unknown)]
    names = [("ngram",), *(("ngram", name) for name in sources), ("ngram", *sources)]
    for each in dict.fromkeys(names):
        drafters = [loaded[name].open(session, vocab_size, SlotMemory()) for name in each]
        for drafter in drafters:
            undo.callback(drafter.close)
        arms.append(Arm("+".join(each), drafters, unknown))
    return arms


def measure(
    session: Session,
    drafters: Sequence[Drafter],
    sources: dict[str, Model | AttachedDraft],
    contexts: Sequence[int],
    seconds: float,
) -> Profile:
    """What `edgespec tune` would store."""
    rows = measure_rows(session, seconds / (1 + len(contexts)))
    costs, failures = measure_drafters({each.name: each for each in drafters}.values(), session)
    if failures:
        raise click.ClickException(str(failures))
    attached = {name: each for name, each in sources.items() if isinstance(each, AttachedDraft)}
    return measure_contexts(session, Profile(rows, costs), sorted(contexts), seconds, attached)


@contextmanager
def fill(session: LlamaSession, n: int) -> Iterator[list[int]]:
    """[n] tokens, which the session takes for the beginning of its text; see above. Raises click.ClickException."""
    context, rng = session.context, np.random.default_rng(0)
    filler: list[int] = rng.integers(0, session.capabilities.vocab_size, n).tolist()
    memory, api = context.native.memory, session.api
    session.rewind(0)
    read_prompt(session, filler[:COMPUTED])
    if extend_cache(session, n) < n:
        raise click.ClickException("llama.cpp cannot copy the cells of this model.")
    spare = context.acquire_spare(1)
    api.llama_memory_seq_cp(memory, session.sequence, spare[0], -1, -1)
    api.llama_memory_seq_rm(memory, session.sequence, -1, -1)
    session.hold(filler)
    try:
        yield filler
    finally:
        session.rewind(0)
        api.llama_memory_seq_rm(memory, spare[0], -1, -1)
        context.release_spare(spare)


def run(arm: Arm, session: Session, text: Sequence[int], tokens: int, temperature: float, *, seed: int) -> None:
    """Generate `tokens` after `text`, which the cache holds."""
    vocab_size = session.capabilities.vocab_size
    sampler = Sampler(SamplingParams(temperature=temperature), vocab_size)
    controller: Controller = FixedLength((), Budget(0, 0), vocab_size)
    if arm.drafters:
        draw = make_draw(RULE, sampler, seed)
        controller = make_adaptive_controller(arm.stats, session, arm.drafters, draw, f"{RULE} at {temperature:.1f}")
    verifier = make_verifier(RULE, sampler, seed)
    events = speculate(session, controller, verifier, text, max_tokens=tokens, stop=frozenset())
    steps = [event for event in events if isinstance(event, Step)]
    controller.end()
    n = sum(len(step.tokens) for step in steps[1:])
    drafting_s = sum(step.draft_s for step in steps[1:])
    arm.runs.append(((steps[-1].at_s - steps[0].at_s) / n, n / (len(steps) - 1), drafting_s / n))
    for step in steps[1:]:
        if step.n_drafted and step.decision is not None:
            arm.sources[step.decision.source] = arm.sources.get(step.decision.source, 0) + 1


def summarize(arm: Arm, plain: Arm, n: int) -> dict[str, Any]:
    """The arm over plain decoding: the median of the turns' ratios, and their extremes."""
    ratios = [base / ours for (base, _, _), (ours, _, _) in zip(plain.runs, arm.runs, strict=True)]
    row = {
        "context": n,
        "arm": arm.name,
        "plain_ms": median(s for s, _, _ in plain.runs) * 1e3,
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "tau": median(tau for _, tau, _ in arm.runs),
        "drafting_ms": median(s for _, _, s in arm.runs) * 1e3,
        "drafted_rounds": arm.sources,
    }
    click.echo(
        f"{n:6}  {arm.name:20} {row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f}) of plain, "
        f"tau {row['tau']:.2f}, plain {row['plain_ms']:.1f} ms, drafting {row['drafting_ms']:.2f} ms, {arm.sources}",
        err=True,
    )
    return row


if __name__ == "__main__":
    main()
