"""Drafts that a model makes of itself, beside plain decoding and a draft model: acceptance, cost, speed, memory.

    uv run python -m benchmarks.selfdrafts --target T.gguf --draft D.gguf --method layerskip:2 --method qspec:4
    uv run python -m benchmarks.selfdrafts --backend mlx --target FOLDER --method layerskip:2 --gamma 3 --plot out.svg

Greedy, fixed lengths (0 is the autopilot, which may also look tokens up), arms interleaved, medians over repeats of
each prompt; speeds are geometric means of ratios to plain decoding of the same prompt and repeat.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, cast

import click
import psutil

from benchmarks.machine import describe
from edgespec.backends import BackendName, Model, open_model
from edgespec.backends.attached_draft import SelfDraftModel, SelfDraftSpec, parse
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.core.metrics import Metrics
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from edgespec.text.chat_template import Message


@dataclass
class Arm:
    """One way to draft, on the target that all share."""

    name: str
    engine: Engine
    speculation: Speculation
    extra_bytes: int
    rss_bytes: int
    runs: list[list[Metrics]]


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), help="A draft model, as one more arm.")
@click.option("--method", "methods", multiple=True, help="A self-draft, as --draft of `edgespec run` takes it.")
@click.option("--gamma", "gammas", multiple=True, type=int, default=(3,), show_default=True)
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp")
@click.option("--category", default="code_completion", show_default=True)
@click.option("--prompts", type=int, default=4, show_default=True)
@click.option("--tokens", type=int, default=64, show_default=True)
@click.option("--repeats", type=int, default=2, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--ctx", type=int, default=1024, show_default=True)
@click.option("--copies", type=click.Path(path_type=Path), default=Path("/tmp/edgespec-copies"), show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="An SVG of acceptance by cost.")
def main(
    target: Path, draft: Path | None, methods: tuple[str, ...], gammas: tuple[int, ...], backend: str, category: str,
    prompts: int, tokens: int, repeats: int, threads: int, ctx: int, copies: Path, plot: Path | None,
) -> None:  # fmt: skip
    options = LoadOptions(context_size=ctx, threads=threads if backend == "llamacpp" else None)

    def opened(path: Path) -> Model:
        return open_model(cast("BackendName", backend), path, options, progress=lambda f: None, check=lambda: None)

    model = opened(target)
    arms = [Arm("plain", Engine(model, None, Speculation("none", 0)), Speculation("none", 0), 0, 0, [])]
    for name in [*([draft.name] if draft else []), *methods]:
        before = _resident()
        method = parse(name)
        other = opened(draft) if method is None and draft else _made(model, method, name, copies / target.stem)
        extra = other.extra_bytes if isinstance(other, SelfDraftModel) else _size(draft)
        engine = Engine(model, other, Speculation("model", 1))
        _generate(engine, "x = 1", 4)
        grown = _resident() - before
        for gamma in gammas:
            label = f"{name}, {gamma}" if gamma else f"{name}, autopilot"
            arms.append(Arm(label, engine, Speculation("model", gamma or None), extra, grown, []))
    chosen = [prompt.turns[0] for prompt in read_shipped_prompts([category])][:prompts]
    texts: dict[str, set[str]] = {prompt: set() for prompt in chosen}
    for prompt in chosen:
        for arm in arms:
            arm.runs.append([])
        for _ in range(repeats):
            for arm in arms:
                arm.engine.speculation = arm.speculation
                text, metrics = _generate(arm.engine, prompt, tokens)
                texts[prompt].add(text)
                arm.runs[-1].append(metrics)
    rows = [_row(arm, arms[0]) for arm in arms]
    click.echo(f"{'arm':34} x plain  worst  accepted   tau  drafted token  verify  extra MB  RSS MB")
    for row in rows:
        click.echo(
            f"{row['arm']:34} {row['speedup']:7.2f} {row['worst']:6.2f} {row['accepted']:9.0%} {row['tau']:5.2f} "
            f"{row['draft']:14.2f} {row['verify']:7.2f} {row['extra_bytes'] / 1e6:9.1f} {row['rss_bytes'] / 1e6:7.1f}"
        )
    forks = sum(len(found) - 1 for found in texts.values())
    if plot:
        _plot(rows[1:], plot)
    click.echo(json.dumps({"benchmark": "selfdrafts", "tokens": tokens, "prompts": len(chosen), "repeats": repeats,
                           "threads": threads, "other_texts": forks, "arms": rows, **describe(target)}))  # fmt: skip


def _generate(engine: Engine, prompt: str, tokens: int) -> tuple[str, Metrics]:
    events = list(engine.stream(Request((Message("user", prompt),), SamplingParams(temperature=0), tokens)))
    finished = events[-1]
    assert isinstance(finished, Finished)
    return str(finished.tokens), finished.metrics


def _row(arm: Arm, plain: Arm) -> dict[str, Any]:
    """Ratios over prompts; costs in plain steps."""
    step = median(m.tpot_s or math.nan for runs in plain.runs for m in runs)
    ratios = [
        median((p.tpot_s or math.nan) / (m.tpot_s or math.nan) for p, m in zip(theirs, ours, strict=True))
        for theirs, ours in zip(plain.runs, arm.runs, strict=True)
    ]
    every = [m for runs in arm.runs for m in runs]
    drafted, rounds = sum(m.drafted_tokens for m in every), sum(m.target_forwards for m in every)
    return {
        "arm": arm.name,
        "speedup": geometric_mean(ratios),
        "worst": min(ratios),
        "accepted": sum(m.accepted_tokens for m in every) / drafted if drafted else 0.0,
        "tau": sum(m.emitted_tokens - 1 for m in every) / rounds,
        "draft": sum(m.draft_s for m in every) / drafted / step if drafted else 0.0,
        "verify": sum(m.verify_s for m in every) / rounds / step,
        "extra_bytes": arm.extra_bytes,
        "rss_bytes": arm.rss_bytes,
    }


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for kind, marker in (("layerskip", "s"), ("qspec", "^"), ("sparse", "D"), ("", "o")):
        for row in rows:
            if kind == _kind(row["arm"]):
                axes.plot(row["draft"], row["accepted"], marker, label=f"{row['arm']}: {row['speedup']:.2f}x plain")
    axes.set(xlabel="cost of a drafted token, in plain steps", ylabel="share of drafted tokens accepted")
    axes.set(xlim=(0, None), ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    figure.tight_layout()
    FigureCanvasSVG(figure).print_svg(path)


def _kind(arm: str) -> str:
    return next((kind for kind in ("layerskip", "qspec", "sparse") if kind in arm), "")


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _size(path: Path | None) -> int:
    if path is None:
        return 0
    return sum(f.stat().st_size for f in path.glob("*.safetensors")) if path.is_dir() else path.stat().st_size


def _made(model: Model, method: SelfDraftSpec | None, name: str, folder: Path) -> SelfDraftModel:
    if method is None:
        raise click.BadParameter(f"{name} is no self-draft", param_hint="--method")
    return model.self_draft(method, folder=folder, progress=lambda f: None, check=lambda: None)


if __name__ == "__main__":
    main()
