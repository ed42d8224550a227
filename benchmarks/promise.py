"""The autopilot against plain decoding, prompt by prompt: the slowest texts, and the host's time in a round.

    uv run python -m benchmarks.promise [--target T --draft D] [--prompts 60] [--tokens 96] [--repeats 5] \
        [--threads 1] [--temperature 0 --temperature 0.8] [--drafts right --drafts wrong --drafts none]

One engine, whose statistics persist from text to text. Each prompt runs plainly and with the autopilot in alternating
order; its ratio is the median over the repeats of autopilot tokens/s over plain tokens/s. The wrong draft is the same
model with the rows of its head shifted by one token, so that it is as sure as before and wrong. Without a draft plain
decoding runs against itself, which shows the noise of the machine. A round's host time is all between two steps except
the forwards of target and draft. "said" compares the ratio that edgespec itself shows for an answer, median over the
repeats, with the measured one. The runtime's settings are measured first. stdout ends with one JSON line.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product, zip_longest
from pathlib import Path
from shutil import copyfile
from time import perf_counter
from typing import Any, cast

import click
import gguf
import numpy as np

from benchmarks.harness import DRAFT, MODEL_PATH, PLAIN, TARGET, list_loaded, load_model, print_result
from benchmarks.heads import fits
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import Model
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import CATEGORIES, BenchPrompt, read_shipped_prompts
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import Session, Step
from edgespec.core.sampling import SamplingParams
from edgespec.core.scores import Scores
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request

AUTOPILOT = Speculation(("ngram", "model"))
AGAIN = Speculation(("ngram",), draft_max=0)  # plain decoding too
SETTINGS_S = 2.0  # for measuring the runtime's settings
WORST = 0.98  # of plain decoding
KINDS = ("plain", "lookup", "model")  # of a round: by the drafters that it asked


class TimedModel:
    """A model whose sessions add the seconds of their forwards to `seconds`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open_session(self) -> Session:
        return cast(Session, _TimedSession(self._model.open_session(), self))


class _TimedSession:
    def __init__(self, session: Session, model: TimedModel) -> None:
        self._session = session
        self._timed = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def forward(self, *arguments: Any, **options: Any) -> Scores:
        started_s = perf_counter()
        scores = self._session.forward(*arguments, **options)
        self._timed.seconds += perf_counter() - started_s
        return scores


def shift_head(source: Path, destination: Path) -> None:
    """Copy a GGUF file; the score of each token becomes that of the one before."""
    copyfile(source, destination)
    tensors = {each.name: each for each in gguf.GGUFReader(destination, "r+").tensors}
    head = tensors.get("output.weight", tensors["token_embd.weight"]).data
    head[:] = np.roll(head, 1, axis=0)
    if isinstance(head, np.memmap):
        head.flush()


def take_in_turn(n: int, categories: Sequence[str]) -> list[BenchPrompt]:
    """`n` shipped prompts, of each category as many as of the others."""
    shipped = read_shipped_prompts(categories or None)
    by_category = [[each for each in shipped if each.category == name] for name in CATEGORIES]
    return [each for row in zip_longest(*by_category) for each in row if each is not None][:n]


def run_once(
    engine: Engine, speculation: Speculation, request: Request, draft: TimedModel
) -> tuple[Metrics, list[tuple[Step, float]]]:
    """(metrics, the steps with the seconds of the draft's forwards so far)."""
    engine.speculation = speculation
    steps: list[tuple[Step, float]] = []
    for event in engine.stream(request):
        if isinstance(event, Step):
            steps.append((event, draft.seconds))
        elif isinstance(event, Finished):
            return event.metrics, steps
    raise AssertionError("the last event is Finished")


def host_times(steps: Sequence[tuple[Step, float]]) -> list[tuple[str, float]]:
    """(kind of round, its microseconds on the host) of each round after the first."""
    found = []
    for (before, drafted_before), (step, drafted) in pairwise(steps):
        assert step.decision is not None
        kind = "model" if step.decision.drafted else "lookup" if step.n_drafted else "plain"
        found.append((kind, (step.at_s - before.at_s - step.verify_s - (drafted - drafted_before)) * 1e6))
    return found[1:]


def compare(
    engine: Engine,
    other: Speculation,
    prompts: Sequence[BenchPrompt],
    temperature: float,
    tokens: int,
    repeats: int,
    draft: TimedModel,
) -> dict[str, Any]:
    """Plain decoding and `other` on all prompts at one temperature."""
    ratios, said, hosts = defaultdict(list), defaultdict(list), defaultdict(list)
    for turn, prompt in product(range(repeats), prompts):
        request = Request(prompt.turns[0], SamplingParams(temperature=temperature), tokens)
        speeds = {}
        for speculation in (PLAIN, other) if turn % 2 == 0 else (other, PLAIN):
            metrics, steps = run_once(engine, speculation, request, draft)
            speeds[speculation] = metrics.tokens_per_second or 0.0
            if speculation is other and metrics.speedup:
                said[prompt.id].append(metrics.speedup)
            arm = "plain arm, plain" if speculation is PLAIN else "autopilot, "
            for kind, host in host_times(steps):
                hosts[arm if speculation is PLAIN else arm + kind].append(host)
        if all(speeds.values()):
            ratios[prompt.id].append(speeds[other] / speeds[PLAIN])
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    return summarize(medians, {name: statistics.median(each) for name, each in hosts.items()}, prompts) | {
        "temperature": temperature,
        "said": compare_said({name: statistics.median(each) for name, each in said.items()}, medians),
        "rounds": {name: len(each) for name, each in hosts.items()},
    }


def compare_said(said: dict[str, float], measured: dict[str, float]) -> dict[str, Any]:
    """How far the ratio that is shown lies from the measured one, over prompts; negative where too little is shown."""
    errors = [said[name] / measured[name] - 1 for name in said if name in measured]
    quantiles = np.quantile(errors, [0.0, 0.1, 0.5, 0.9, 1.0]).tolist() if errors else []
    return {"prompts": len(errors), "error": [round(each, 3) for each in quantiles]}


def summarize(ratios: dict[str, float], hosts: dict[str, float], prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """`ratios` by prompt, `hosts` microseconds by kind of round."""
    values = np.array(list(ratios.values()))
    category = {each.id: each.category for each in prompts}
    groups = defaultdict(list)
    for name, ratio in ratios.items():
        groups[category[name]].append(ratio)
    return {
        "prompts": len(values),
        "mean": round(float(np.exp(np.log(values).mean())), 3),
        "worst_decile": round(float(np.quantile(values, 0.1)), 3),
        "slowest": round(float(values.min()), 3),
        "fastest": round(float(values.max()), 3),
        "below": round(float((values < WORST).mean()), 3),
        "categories": {name: round(statistics.geometric_mean(each), 3) for name, each in groups.items()},
        "host_us": {name: round(each, 1) for name, each in sorted(hosts.items())},
    }


def load_target(path: Path, options: LoadOptions, draft: TimedModel) -> Model:
    """The target under settings measured for it, which `draft` gets too."""
    model = load_model("llamacpp", path, options)
    assert isinstance(model, LlamaModel)
    settings = model.measure_settings(SETTINGS_S)
    if settings is not None:
        model.use(settings)
        draft.use(settings)
    return cast(Model, model)


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option("--drafts", multiple=True, type=click.Choice(["right", "wrong", "none"]), default=["right", "wrong"])
@click.option("--temperature", "temperatures", multiple=True, type=float, default=[0.0, 0.8], show_default=True)
@click.option("--prompts", "n", type=click.IntRange(1), default=60, show_default=True)
@click.option("--category", "categories", multiple=True, type=click.Choice(CATEGORIES), help="[default: all]")
@click.option("--tokens", type=click.IntRange(4), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--context", default=4096, show_default=True, help="Prompts that do not fit are left out.")
def main(
    target: Path,
    draft: Path,
    drafts: Sequence[str],
    temperatures: Sequence[float],
    n: int,
    categories: Sequence[str],
    tokens: int,
    repeats: int,
    threads: int,
    context: int,
) -> None:
    """Compare the autopilot with plain decoding."""
    options, rows = LoadOptions(threads=threads, context_size=context), []
    with tempfile.TemporaryDirectory() as folder:
        for kind in drafts:
            path = Path(folder) / draft.name if kind == "wrong" else draft
            if kind == "wrong":
                shift_head(draft, path)
            model = TimedModel(load_model("llamacpp", path, options))
            engine = Engine(load_target(target, options, model), list_loaded(model=cast(Model, model)), PLAIN)
            other = AGAIN if kind == "none" else AUTOPILOT
            prompts = take_in_turn(n, categories)
            fitting = [each for each in prompts if fits(engine, each.turns[0], context - tokens)]
            for temperature in temperatures:
                row = {"draft": kind, **compare(engine, other, fitting, temperature, tokens, repeats, model)}
                rows.append(row)
                click.echo(str(row), err=True)
            engine.close()
    options_said = {"tokens": tokens, "repeats": repeats, "threads": threads}
    print_result("promise", {**options_said, "rows": rows}, target, draft)


if __name__ == "__main__":
    main()
