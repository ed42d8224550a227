"""`edgespec bench`: compare decoding configurations on prompts by category; a table, and files with the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completion import complete_category
from edgespec.cli.interrupts import INTERRUPTED, interruptible
from edgespec.cli.options import json_option, load_config, load_options, model_argument, offer, worker_options
from edgespec.cli.terminal import TerminalReporter
from edgespec.errors import Cancelled, InvalidRequest
from edgespec.options import DRAFT, OPTIONS

if TYPE_CHECKING:
    from edgespec.bench.prompt_sets import BenchPrompt
    from edgespec.bench.records import Header, Record, Run
    from edgespec.bench.runner import Bench, Skipped
    from edgespec.client.local import LocalEngine
    from edgespec.client.stream import Stream
    from edgespec.engine.loaded_model import LoadedModel

_PROFILE_S = 10.0


@click.command("bench")
@model_argument
@offer(DRAFT, help="Drafters to compare, joined by '+' ('edgespec doctor' lists them), or a draft model.")
@click.option(
    "--category",
    "categories",
    multiple=True,
    help="Prompt category; repeatable. [default: all]",
    shell_complete=complete_category,
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSONL file of prompts: {'prompt': ...} or Spec-Bench's format.",
)
@click.option("--per-category", type=click.IntRange(1), default=2, help="Prompts per category.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, help="Tokens per answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, help="Runs of each prompt with each arm.")
@offer(
    OPTIONS["draft_max"],
    "--draft-max",
    "draft_lengths",
    type=click.IntRange(1, 63),
    multiple=True,
    help="Fixed number of draft tokens to compare; repeatable. [default: 1 to 8]",
)
@offer(
    OPTIONS["temperature"], "--temperature", "temperatures",
    multiple=True, help="Sampling temperature; repeatable. [default: 0]",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("edgespec-bench"),
    help="Folder for the raw data and the figures.",
)
@json_option
@load_options
@worker_options
def bench_command(
    model: str | None,
    categories: tuple[str, ...],
    prompts: Path | None,
    per_category: int,
    draft_lengths: tuple[int, ...],
    temperatures: tuple[float, ...],
    out: Path,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare plain decoding, fixed draft lengths and the autopilot on this machine.

    Writes every generation as a line of JSONL, and the figures without prompts and folders to show to others; stdout
    ends with one line of JSON. Ctrl-C stops the benchmark and keeps the results so far.
    """
    from edgespec.bench.runner import Bench, list_arms
    from edgespec.bench.summary import format_table, summarize
    from edgespec.cli.engine import open_engine
    from edgespec.core.sampling import SamplingParams

    selected = _select_prompts(prompts, categories, per_category)
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # raises before anything is loaded
    if options["draft"] == "none":
        raise InvalidRequest("there is nothing to compare without a draft.", hint="Use --draft auto or ngram.")
    records: list[Record] = []
    with closing(open_engine(load_config(model, options), verbose=options["verbose"])) as local:
        loaded = local.require_loaded()
        engine = loaded.engine
        arms = list_arms(engine.speculation.drafters, sorted(set(draft_lengths)) or range(1, 9))
        bench = Bench(engine, arms, selected, temperatures or (0.0,), options["repeats"], options["max_tokens"])
        out.mkdir(parents=True, exist_ok=True)
        raw = out / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        interrupted = _record(local, bench, _header(loaded, bench), raw, records)
    summary = summarize(records)
    if not as_json:
        click.echo(format_table(summary))
    shared, devices = raw.with_suffix(".share.json"), [asdict(device) for device in loaded.info.devices]
    shared.write_text(json.dumps({"devices": devices, **summary.describe()}, indent=1), encoding="utf-8")
    click.echo(f"raw data: {raw}\nto share: {shared}", err=True)
    outcome = {"bench": loaded.info.name, "interrupted": interrupted, "raw": str(raw)}
    click.echo(json.dumps({**outcome, **summary.findings()}))
    return INTERRUPTED if interrupted else 0


def _select_prompts(file: Path | None, categories: tuple[str, ...], per_category: int) -> list[BenchPrompt]:
    from edgespec.bench.prompt_sets import read_prompts, read_shipped_prompts, take_per_category

    prompts = read_prompts(file) if file else read_shipped_prompts(categories or None)
    if file and categories:
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    if not prompts:
        raise InvalidRequest(f"'{file}' has no prompts of these categories.", hint="Drop --category.")
    return take_per_category(prompts, per_category)


def _header(loaded: LoadedModel, bench: Bench) -> Header:
    """The first record of the raw data: the machine, the models and the settings."""
    from edgespec.autopilot.store import describe_machine
    from edgespec.bench.records import Header

    return Header(
        date=time.strftime("%Y-%m-%d %H:%M"),
        **describe_machine(),
        files=loaded.store.digests if loaded.store else {},
        backend=loaded.info.backend,
        model=loaded.info.name,
        draft=loaded.info.draft,
        threads=loaded.key["threads"] or 0,
        context_size=bench.engine.target.context_size,
        max_tokens=bench.max_tokens,
        repeats=bench.repeats,
    )


def _record(local: LocalEngine, bench: Bench, header: Header, raw: Path, records: list[Record]) -> bool:
    """Run the benchmark. Each record is added to `records` and written to `raw` at once.

    Returns whether Ctrl-C ended it early.
    """
    from edgespec.bench.records import Cost, Run, describe_record
    from edgespec.bench.runner import Skipped

    reporter = TerminalReporter()

    def work() -> Iterator[Cost | Run | Skipped]:
        profile = bench.engine.measure(_PROFILE_S)
        yield Cost(32, profile.rows, profile.drafts)
        yield from bench.run(profile)

    with raw.open("w", encoding="utf-8") as file:

        def keep(record: Record) -> None:
            records.append(record)
            file.write(json.dumps(describe_record(record)) + "\n")
            file.flush()

        keep(header)
        n_runs = 0
        try:
            found: Stream[Cost | Run | Skipped] = local.submit(work)
            for each in interruptible(found):
                if isinstance(each, Skipped):
                    reporter.notice(f"{each.prompt} is left out: {each.reason}")
                    continue
                keep(each)
                if isinstance(each, Run):
                    n_runs += 1
                    reporter.draw("benchmark", n_runs, bench.runs, each.prompt)
        except Cancelled:
            return True
        finally:
            reporter.end_bar()
    return False
