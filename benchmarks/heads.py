"""Trained heads on one target: acceptance by depth, price, speed of chains, trees and the autopilot, and with lookups.

    uv run python -m benchmarks.heads --target T.gguf --head H.gguf [--head H2.gguf]        # llama.cpp
    uv run python -m benchmarks.heads --backend mlx --target T.gguf --head HEAD_FOLDER      # MLX; or a folder

Each head is loaded beside the target; a head in the target's own file is named by that file. Prompts run greedily, arms
in turn: a chain and a tree of fixed size, the autopilot, each with the head alone and with lookups beside it, and
lookups alone. At the temperature of --sampled a chain runs under the rules of acceptance, with seeds where the rule
allows one. "x plain" is the geometric mean over prompts of the ratio of tokens/s to plain decoding. "same" counts the
texts that equal plain decoding's. tau is tokens a round; alpha is the acceptance by depth. The price is that of a
drafted token, or of a block, in plain steps. stdout ends with one JSON line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from benchmarks.harness import MODEL_PATH, PLAIN, TARGET, generate, list_loaded, load_model, print_result
from edgespec.autopilot.speculation import Rule, Speculation
from edgespec.backends import BackendName, Model
from edgespec.backends.attached_draft import AttachedHead
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.core.metrics import Metrics
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Prompt, Request
from edgespec.errors import ContextOverflow, EdgespecError
from edgespec.formats.head_file import read_head

RULES: tuple[Rule, ...] = ("sample", "rejection", "block")


@dataclass
class Arm:
    """One way to draft at one temperature; `runs` are those of the prompts, `same` the texts equal to plain ones."""

    name: str
    speculation: Speculation
    runs: list[Metrics] = field(default_factory=list)
    same: int = 0


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--head", "heads", type=MODEL_PATH, multiple=True, required=True)
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), help="[default: mlx for a folder]")
@click.option("--category", "categories", multiple=True, default=("code_completion", "code_edit"), show_default=True)
@click.option("--prompts", "n_prompts", type=click.IntRange(1), default=10, show_default=True, help="Of each category.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--draft-max", "length", type=click.IntRange(1), default=3, show_default=True)
@click.option("--draft-tree", "nodes", type=click.IntRange(2), default=8, show_default=True)
@click.option("--sampled", type=click.FloatRange(0.5), default=0.8, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ctx", type=click.IntRange(64), default=2048, show_default=True, help="Longer prompts are left out.")
def main(
    target: Path,
    heads: Sequence[Path],
    backend: BackendName | None,
    categories: Sequence[str],
    n_prompts: int,
    tokens: int,
    length: int,
    nodes: int,
    sampled: float,
    threads: int,
    ctx: int,
) -> None:
    """Measure each HEAD on TARGET."""
    prompts = {name: [each.turns[0] for each in read_shipped_prompts([name])][:n_prompts] for name in categories}
    backend = backend or ("mlx" if target.is_dir() else "llamacpp")
    results = []
    for path in heads:
        options = LoadOptions(context_size=ctx, threads=threads if backend == "llamacpp" else None, mtp=path == target)
        try:
            model = load_model(backend, target, options)
            head = open_head(model, path)
        except EdgespecError as error:
            raise click.ClickException(f"{error.message} {error.hint}") from error
        engine = Engine(model, list_loaded(**{head.name: head}), PLAIN)
        result: dict[str, Any] = {"head": head.name, "backend": backend, "price": measure_price(engine, head.name)}
        for category, texts in prompts.items():
            fitting = [text for text in texts if fits(engine, text, ctx - tokens)]
            arms = list_greedy_arms(head.name, length, nodes, takes_trees=model.no_tree_reason is None)
            result[category] = run_arms(engine, arms, fitting, 0.0, tokens)
            rules = [Arm(rule, Speculation((head.name,), length, acceptance=rule)) for rule in RULES]
            result[f"{category} at {sampled:g}"] = run_arms(engine, rules, fitting, sampled, tokens)
        click.echo(format_result(result), err=True)
        results.append(result)
        engine.close()
    print_result("heads", {"tokens": tokens, "draft_max": length, "draft_tree": nodes, "heads": results}, target)


def fits(engine: Engine, prompt: Prompt, size: int) -> bool:
    try:
        return len(engine.encode(prompt)) < size
    except ContextOverflow:
        return False


def open_head(model: Model, path: Path) -> AttachedHead:
    """Load the head that `path` holds for `model`. Raises EdgespecError, click.ClickException."""
    spec = read_head(path)
    if spec is None:
        raise click.ClickException(f"{path} holds no trained head.")
    head = model.load_head(spec, path)
    head.shorten()
    return head


def measure_price(engine: Engine, name: str) -> dict[int, float]:
    """By tokens on a path, the time of a unit that drafts them, in plain steps."""
    costs = engine.draft_stats.costs
    units = costs.profile.drafts[name].units if costs.has_cost(name) else {}
    return {n: round(costs.unit_s(name, n) / costs.seconds(1), 3) for n in sorted(units)}


def list_greedy_arms(name: str, length: int, nodes: int, *, takes_trees: bool) -> list[Arm]:
    both = ("ngram", name)
    arms = [
        Arm("plain", PLAIN),
        Arm(f"chain {length}", Speculation((name,), length)),
        Arm(f"chain {length} + ngram", Speculation(both, length)),
        Arm(f"ngram {length}", Speculation(("ngram",), length)),
        Arm("autopilot", Speculation((name,))),
        Arm("autopilot + ngram", Speculation(both)),
        Arm("autopilot, ngram", Speculation(("ngram",))),
    ]
    return arms + ([Arm(f"tree {length}/{nodes}", Speculation((name,), length, nodes))] if takes_trees else [])


def run_arms(
    engine: Engine, arms: list[Arm], prompts: Sequence[str], temperature: float, tokens: int
) -> list[dict[str, Any]]:
    """Run the arms in turn on each prompt, in reverse order on every second one. The first one decodes plainly."""
    if temperature:
        arms = [Arm("plain", PLAIN), *arms]
    for i, prompt in enumerate(prompts):
        found: dict[str, Finished] = {}
        for arm in arms[:: 1 if i % 2 == 0 else -1]:
            seed = None if arm.speculation.acceptance in ("rejection", "block") else i
            request = Request(prompt, SamplingParams(temperature=temperature), tokens, seed=seed)
            found[arm.name] = generate(engine, arm.speculation, request)
        for arm in arms:
            arm.runs.append(found[arm.name].metrics)
            arm.same += found[arm.name].tokens == found["plain"].tokens
    return [summarize(arm, arms[0]) for arm in arms]


def summarize(arm: Arm, plain: Arm) -> dict[str, Any]:
    """One row: ratios over prompts, counts over all tokens."""
    pairs = zip(arm.runs, plain.runs, strict=True)
    ratios = [p.tpot_s / m.tpot_s for m, p in pairs if m.tpot_s and p.tpot_s]
    rounds = sum(m.target_forwards for m in arm.runs)
    depth = max((len(m.alpha_by_depth) for m in arm.runs), default=0)
    alpha = [[m.alpha_by_depth[d] for m in arm.runs if len(m.alpha_by_depth) > d] for d in range(depth)]
    return {
        "arm": arm.name,
        "same": f"{arm.same}/{len(arm.runs)}",
        "tau": round(sum(m.emitted_tokens - 1 for m in arm.runs) / rounds, 2) if rounds else None,
        "alpha": [round(sum(each) / len(each), 2) for each in alpha],
        "x plain": round(geometric_mean(ratios), 2) if ratios else None,
        "worst": round(min(ratios), 2) if ratios else None,
    }


def format_result(result: dict[str, Any]) -> str:
    lines = [f"{result['head']} on {result['backend']}; price in plain steps, by tokens: {result['price']}"]
    for title, rows in result.items():
        if isinstance(rows, list):
            lines.append(f"  {title:26} x plain  worst    tau   same  alpha by depth")
            lines += [
                f"    {row['arm']:24} {row['x plain'] or 0:7.2f} {row['worst'] or 0:6.2f} {row['tau'] or 0:6.2f} "
                f"{row['same']:>6}  {' '.join(f'{each:.2f}' for each in row['alpha'][:4])}"
                for row in rows
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
