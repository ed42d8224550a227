"""`edgespec bench`: every way to decode, interleaved over prompts by category; a table, raw data and a report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import load_options, open_request

if TYPE_CHECKING:
    from edgespec.bench.prompt_sets import BenchPrompt
    from edgespec.bench.runner import Skipped
    from edgespec.core.protocols import CheckCancelled

_PROFILED_S = 10.0


@click.command("bench")
@click.argument("model", metavar="[REF]", required=False)
@click.option("--draft", default="auto", show_default=True, metavar="auto|model|ngram|REF",
              help="The registry's draft model, lookups only, or a model of your choice.")  # fmt: skip
@click.option("--category", "categories", multiple=True, help="Of the shipped prompts; repeatable. [default: all]")
@click.option("--prompts", type=click.Path(dir_okay=False, path_type=Path),
              help="JSONL of your own, lines of {'prompt': ...} or in Spec-Bench's form.")  # fmt: skip
@click.option("--per-category", type=click.IntRange(1), default=2, show_default=True, help="Prompts of each, at most.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Longest answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--gamma", "gammas", type=click.IntRange(1, 63), multiple=True,
              help="Fixed draft lengths to compare with; repeatable. [default: 1 to 8]")  # fmt: skip
@click.option("--temperature", "temperatures", type=click.FloatRange(0), multiple=True, help="Repeatable. [default: 0]")
@click.option("--label", default="", help="What the figures have to be called, such as 'cost-faithful 1B'.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("edgespec-bench"),
              show_default=True, help="Folder for the raw data and the report.")  # fmt: skip
@load_options
def bench_command(
    model: str | None,
    categories: tuple[str, ...],
    prompts: Path | None,
    per_category: int,
    gammas: tuple[int, ...],
    temperatures: tuple[float, ...],
    label: str,
    out: Path,
    **given: Any,
) -> int:
    """Compare plain decoding, fixed draft lengths and the autopilot on this machine.

    Writes every generation as a line of JSONL and a report as HTML; ends with one line of JSON. Ctrl-C keeps what was
    measured.
    """
    from edgespec.bench.records import read
    from edgespec.bench.report import write_report
    from edgespec.bench.runner import Bench, Skipped, arms
    from edgespec.bench.stats import summarize
    from edgespec.bench.summary import table
    from edgespec.cli.host import Host
    from edgespec.cli.interrupts import INTERRUPTED
    from edgespec.cli.terminal import Progress
    from edgespec.controller.store import machine
    from edgespec.core.sampling import SamplingParams
    from edgespec.errors import Cancelled, InvalidRequest

    chosen = _chosen(prompts, categories, per_category)
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # refuse what is wrong before anything is loaded
    if given["draft"] == "none":
        raise InvalidRequest("there is nothing to compare without a draft.", hint="Use --draft auto or ngram.")
    host = Host(open_request(model, given), verbose=given["verbose"])
    loaded, engine = host.loaded, host.loaded.engine
    ways = arms(engine.speculation.kind, sorted(set(gammas)) or range(1, 9))
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress("benchmark")
    raw = out / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    header = {
        "kind": "header",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **machine(),
        "files": loaded.store.digests if loaded.store else {},
        "backend": loaded.backend,
        "model": loaded.name,
        "draft": loaded.draft,
        "threads": loaded.setting.threads or 0,
        "context_size": engine.target.context_size,
        "max_tokens": given["max_tokens"],
        "repeats": given["repeats"],
        "label": label,
    }

    def work(check: CheckCancelled) -> Iterator[dict[str, Any] | Skipped]:
        profile = engine.measure(_PROFILED_S, check)
        yield {"kind": "cost", "position": 32, "rows": profile.rows, "draft_s": profile.draft_s}
        bench = Bench(engine, ways, chosen, temperatures or (0.0,), given["repeats"], given["max_tokens"], profile)
        progress.expect(bench.runs)
        yield from bench.run(check)

    interrupted = False
    with raw.open("w", encoding="utf-8") as file, progress:
        file.write(json.dumps(header) + "\n")
        try:
            for found in host.work(work):
                if isinstance(found, Skipped):
                    progress.note(f"{found.prompt} is left out: {found.reason}")
                    continue
                file.write(json.dumps(found) + "\n")
                file.flush()
                if found["kind"] == "run":
                    progress.step(found["prompt"])
        except Cancelled:
            interrupted = True
    host.close()
    summary = summarize(read(raw))
    report = raw.with_suffix(".html")
    write_report(summary, report)
    click.echo(table(summary))
    click.echo(f"raw data: {raw}\nreport:   {report}", err=True)
    found = {name: value for part in summary.parts for name, value in part.findings().items()}
    click.echo(json.dumps({"bench": loaded.name, "interrupted": interrupted, "raw": str(raw), **found}))
    return INTERRUPTED if interrupted else 0


def _chosen(prompts: Path | None, categories: tuple[str, ...], per_category: int) -> list[BenchPrompt]:
    """The prompts to run, `per_category` of each. Raises InvalidRequest."""
    from edgespec.bench.prompt_sets import read_prompts, shipped, some_of_each
    from edgespec.errors import InvalidRequest

    found = read_prompts(prompts) if prompts else shipped(categories or None)
    if prompts and categories:
        found = [prompt for prompt in found if prompt.category in categories]
    if not found:
        raise InvalidRequest(f"{prompts} has no prompts of these categories.", hint="Drop --category.")
    return some_of_each(found, per_category)
