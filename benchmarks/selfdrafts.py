"""Drafts that a model makes of itself, compared with plain decoding and a draft model: acceptance, cost, speed, memory.

    uv run python -m benchmarks.selfdrafts --target T.gguf --draft D.gguf --method layerskip:2 --method qspec:4
    uv run python -m benchmarks.selfdrafts --backend mlx --target FOLDER --method layerskip:2 --plot out.svg

Greedy decoding, drafts of fixed length (0 is the autopilot, which may also use n-grams), arms interleaved. Speeds are
geometric means over prompts of the median ratio to plain decoding of the same prompt and repeat; costs are in plain
steps of the same run. stdout ends with one JSON line.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import psutil

from benchmarks.harness import MODEL_PATH, PLAIN, TARGET, generate, list_loaded, load_model, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.backends import BackendName, Model
from edgespec.backends.attached_draft import AttachedDraft, parse
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.core.metrics import Metrics
from edgespec.core.sampling import SamplingParams
from edgespec.drafters import SELF
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.text.chat_template import Message

COPIES = Path(tempfile.gettempdir()) / "edgespec-copies"  # where requantized copies are kept
METHODS = ("layerskip", "qspec", "sparse")


@dataclass
class Arm:
    """One draft on the target that all arms share; `runs` is [prompts][repeats]."""

    name: str
    engine: Engine
    speculation: Speculation
    extra_bytes: int = 0
    rss_bytes: int = 0
    runs: list[list[Metrics]] = field(default_factory=list)


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, help="A draft model, as one more arm.")
@click.option("--method", "methods", multiple=True, help="A self-draft, as for `edgespec run --draft`; repeatable.")
@click.option("--draft-max", "lengths", multiple=True, type=int, default=(3,), show_default=True)
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--category", default="code_completion", show_default=True)
@click.option("--prompts", "n_prompts", type=click.IntRange(1), default=4, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--ctx", type=int, default=1024, show_default=True)
@click.option("--copies", type=click.Path(path_type=Path), default=COPIES, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Write an SVG of acceptance by cost.")
def main(
    target: Path,
    draft: Path | None,
    methods: tuple[str, ...],
    lengths: tuple[int, ...],
    backend: BackendName,
    category: str,
    n_prompts: int,
    tokens: int,
    repeats: int,
    threads: int,
    ctx: int,
    copies: Path,
    plot: Path | None,
) -> None:
    """Compare each METHOD with plain decoding."""
    options = LoadOptions(context_size=ctx, threads=threads if backend == "llamacpp" else None)
    model = load_model(backend, target, options)
    arms = [Arm("plain", Engine(model, [], PLAIN), PLAIN)]
    if draft:
        arms += open_arms(draft.name, model, lengths, partial(load_model, backend, draft, options), weight_bytes(draft))
    for name in methods:
        arms += open_arms(name, model, lengths, partial(open_self_draft, model, name, copies / target.stem))
    prompts = [prompt.turns[0] for prompt in read_shipped_prompts([category])][:n_prompts]
    divergences = sum(run_prompt(arms, prompt, tokens, repeats) - 1 for prompt in prompts)
    rows = [summarize(arm, arms[0]) for arm in arms]
    click.echo(format_table(rows), err=True)
    if plot:
        draw_plot(rows[1:], plot)
    settings = {"tokens": tokens, "prompts": len(prompts), "repeats": repeats, "threads": threads}
    print_result("selfdrafts", {**settings, "other_texts": divergences, "arms": rows}, target)


def open_arms(
    name: str,
    model: Model,
    lengths: Sequence[int],
    open_draft: Callable[[], Model | AttachedDraft],
    extra_bytes: int = 0,
) -> list[Arm]:
    """One arm for each draft length, on one draft; `extra_bytes` unless the draft states its own."""
    before = resident_bytes()
    draft = open_draft()
    if isinstance(draft, AttachedDraft):
        extra_bytes = draft.extra_bytes
    drafter = SELF if isinstance(draft, AttachedDraft) else "model"
    engine = Engine(model, list_loaded(**{drafter: draft}), PLAIN)
    generate(engine, Speculation((drafter,), 1), make_request("x = 1", 4))
    grown = resident_bytes() - before
    return [
        Arm(
            f"{name}, {n or 'autopilot'}",
            engine,
            Speculation((drafter,) if n else ("ngram", drafter), n or None),
            extra_bytes,
            grown,
        )
        for n in lengths
    ]


def open_self_draft(model: Model, name: str, folder: Path) -> AttachedDraft:
    """Make a draft of `model`; requantized copies go to `folder`. Raises click.BadParameter."""
    method = parse(name)
    if method is None:
        raise click.BadParameter(f"{name} is not a self-draft.", param_hint="--method")
    return model.make_self_draft(method, folder=folder)


def make_request(prompt: str, tokens: int) -> Request:
    """Greedy, in the chat template."""
    return Request((Message("user", prompt),), SamplingParams(temperature=0), tokens)


def run_prompt(arms: Sequence[Arm], prompt: str, tokens: int, repeats: int) -> int:
    """Run all arms in turn, `repeats` times; returns how many different texts they gave."""
    texts = set()
    for arm in arms:
        arm.runs.append([])
    for _ in range(repeats):
        for arm in arms:
            finished = generate(arm.engine, arm.speculation, make_request(prompt, tokens))
            texts.add(finished.tokens)
            arm.runs[-1].append(finished.metrics)
    return len(texts)


def summarize(arm: Arm, plain: Arm) -> dict[str, Any]:
    """One row: ratios over prompts, costs in plain steps."""
    step_s = median(m.tpot_s or math.nan for runs in plain.runs for m in runs)
    ratios = [
        median((p.tpot_s or math.nan) / (m.tpot_s or math.nan) for p, m in zip(plain_runs, runs, strict=True))
        for plain_runs, runs in zip(plain.runs, arm.runs, strict=True)
    ]
    metrics = [m for runs in arm.runs for m in runs]
    drafted, rounds = sum(m.drafted_tokens for m in metrics), sum(m.target_forwards for m in metrics)
    return {
        "arm": arm.name,
        "speedup": geometric_mean(ratios),
        "worst": min(ratios),
        "accepted": sum(m.accepted_tokens for m in metrics) / drafted if drafted else 0.0,
        "tau": sum(m.emitted_tokens - 1 for m in metrics) / rounds,
        "draft": sum(m.draft_s for m in metrics) / drafted / step_s if drafted else 0.0,
        "verify": sum(m.verify_s for m in metrics) / rounds / step_s,
        "extra_bytes": arm.extra_bytes,
        "rss_bytes": arm.rss_bytes,
    }


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    header = f"{'arm':34} x plain  worst  accepted   tau  drafted token  verify  extra MB  RSS MB"
    lines = (
        f"{row['arm']:34} {row['speedup']:7.2f} {row['worst']:6.2f} {row['accepted']:9.0%} {row['tau']:5.2f} "
        f"{row['draft']:14.2f} {row['verify']:7.2f} {row['extra_bytes'] / 1e6:9.1f} {row['rss_bytes'] / 1e6:7.1f}"
        for row in rows
    )
    return "\n".join([header, *lines])


def draw_plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """An SVG: share of drafted tokens accepted, by the cost of a drafted token."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for method, marker in zip((*METHODS, ""), "s^Do", strict=True):
        for row in rows:
            if method == next((each for each in METHODS if each in row["arm"]), ""):
                axes.plot(row["draft"], row["accepted"], marker, label=f"{row['arm']}: {row['speedup']:.2f}x plain")
    axes.set(xlabel="cost of a drafted token, in plain steps", ylabel="share of drafted tokens accepted")
    axes.set(xlim=(0, None), ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    figure.tight_layout()
    FigureCanvasSVG(figure).print_svg(path)  # type: ignore[no-untyped-call]


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def weight_bytes(path: Path) -> int:
    """Of a GGUF file, or of the weights in a model folder."""
    files = path.glob("*.safetensors") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    main()
