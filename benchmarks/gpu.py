"""One GPU measured in a few minutes: programs of this project one after the other, the most telling ones first.

    uv run python -m benchmarks.gpu RESULTS --model SmolLM2-135M-Instruct.Q4_1.gguf --llama-server PATH \
        --prompts specbench.jsonl [--minutes 8] [--large 8b --small 1b] [--only contract --only real]

The large model is --model at the cost of --large, the small one the embedded target at the cost of --small, with a
draft and an EAGLE-3 head. They are made while the contract is tested; everything else runs alone. The steps:

    contract  tests/gpu and the contract of sessions, with the tolerances of a device
    doctor    edgespec doctor --gpu
    large     plain decoding, the autopilot, lookups, lookahead and a tree, beside llama-server
    real      the same with --model itself, whose steps are short
    streams   one caller and four of edgespec serve and of llama-server, large model
    host      the whole loop against bare decoding, --model
    lookups   the time of decisions and lookups in a round, --model
    small     a draft model and a head, chains and a tree, beside llama-server with the same draft
    selves    the large model's drafts of itself, which take memory and time to make
    together  one answer and four in one process, small model

A step gets at most its share of the time, and is left out where less than half of that is left. One that fails or is
cut is told, and the next one runs. gpu.json of the folder RESULTS has each program's command, seconds, exit code and
result, and is written after each. The rounds of comparisons are files there too; tables are made of those that there
are. gpu.log has all that the programs print. The installed llama.cpp decides which device is measured. stdout ends with
one JSON line.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree, which
from threading import Lock
from time import monotonic
from typing import Any

import click
import psutil

from benchmarks.gpu_steps import STEPS, Setting, Step, Words
from benchmarks.harness import MODEL_PATH, REPOSITORY, describe, print_result
from benchmarks.peers_tables import Group, Record, format_markdown, summarize

N_LINES = 12  # of a program's output that are kept where no JSON line ends it
SHAPES = "A shape of laboratory.cost_faithful."


class Report:
    """What was found within `seconds` from now on, in the files gpu.json and gpu.log of `folder`."""

    def __init__(self, folder: Path, seconds: float, model: Path) -> None:
        self.outcomes: list[dict[str, Any]] = []
        self._folder, self._seconds, self._end_s = folder, seconds, monotonic() + seconds
        self._conditions = {"minutes": seconds / 60, **describe(model)}
        self._log = (folder / "gpu.log").open("a", encoding="utf-8")
        self._lock = Lock()

    def run(self, step: Step) -> None:
        """Run a step's programs within its share, or tell that it is left out."""
        share_s, left_s = step.share * self._seconds, self._end_s - monotonic()
        if left_s < share_s / 2:
            self._add(
                {"step": step.name, "left_out": f"{max(left_s, 0):.0f} s were left; it takes up to {share_s:.0f}"}
            )
            return
        end_s = monotonic() + min(share_s, left_s)
        for words in step.programs:
            if monotonic() >= end_s:
                self._add({"step": step.name, "program": str(words[0]), "left_out": "the step's time was up"})
                continue
            output = self._folder / f"{step.name}.out"
            self._add({"step": step.name, **self._run_program(words, end_s - monotonic(), output)})
            output.unlink()

    def _add(self, outcome: dict[str, Any]) -> None:
        """Keep what became of a program, and tell it. Models are made beside other programs."""
        self._say(told := json.dumps({key: each for key, each in outcome.items() if key not in ("command", "result")}))
        click.echo(told, err=True)
        with self._lock:
            self.outcomes.append(outcome)
            new = self._folder / "gpu.json.new"
            new.write_text(json.dumps({**self._conditions, "outcomes": self.outcomes}, indent=1), encoding="utf-8")
            new.replace(self._folder / "gpu.json")

    def _say(self, *lines: str) -> None:
        self._log.write("".join(f"{line}\n" for line in lines))
        self._log.flush()

    def _run_program(self, words: Words, limit_s: float, output: Path) -> dict[str, Any]:
        """Its seconds, exit code, or that it was cut, and result. While it runs, `output` is its stdout."""
        arguments = list(map(str, words))
        self._say(f"\n$ python -m {shlex.join(arguments)}")
        paths = os.pathsep.join([str(REPOSITORY), *sys.path])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}  # what is killed has told all
        started_s, is_cut = monotonic(), False
        with output.open("wb") as file:
            command = [sys.executable, "-m", *arguments]
            process = psutil.Popen(command, cwd=self._folder, env=environment, stdout=file, stderr=self._log)
            try:
                process.wait(max(limit_s, 0))
            except psutil.TimeoutExpired:
                is_cut = True
            finally:
                end_family(process)
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        self._say(*lines)
        seconds = round(monotonic() - started_s, 1)
        outcome = {"program": arguments[0], "seconds": seconds, "exit": "cut" if is_cut else process.returncode}
        return {**outcome, "command": shlex.join(arguments), "result": self._read_result(arguments, lines)}

    def _read_result(self, arguments: Sequence[str], lines: Sequence[str]) -> Any:
        """The tables of a comparison's rounds, else the JSON line, else the last lines."""
        if "--record" in arguments and (record := Path(arguments[arguments.index("--record") + 1])).exists():
            groups = read_groups(record)
            self._say(format_markdown(groups))
            return {"groups": [asdict(group) for group in groups]}
        with suppress(ValueError, IndexError):
            return json.loads(lines[-1])
        return lines[-N_LINES:]


def end_family(process: psutil.Process) -> None:
    """Kill a process and all that it has started, and wait for it."""
    family = [process]
    with suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def read_groups(record: Path) -> list[Group]:
    """The tables of the rounds that a comparison has recorded so far. Its costs, to go on with, are removed."""
    rmtree(f"{record}.cache", ignore_errors=True)
    with suppress(ValueError), record.open(encoding="utf-8") as lines:
        return summarize(Record(record, json.loads(next(lines, ""))["settings"]).rounds)
    return []


@click.command()
@click.argument("results", type=click.Path(file_okay=False, resolve_path=True, path_type=Path))
@click.option("--model", type=MODEL_PATH, required=True, help="A small real model, GGUF.")
@click.option("--llama-server", "server", default="llama-server", show_default=True, help="Name on PATH, or path.")
@click.option("--prompts", type=MODEL_PATH, help="JSONL file of questions.  [default: the shipped prompts]")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=8.0, show_default=True)
@click.option("--large", default="8b", show_default=True, help=SHAPES)
@click.option("--small", default="1b", show_default=True, help=SHAPES)
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True)
@click.option("--per-category", type=click.IntRange(1), default=1, show_default=True, help="Prompts.")
@click.option("--ctx", "context", type=click.IntRange(64), default=3072, show_default=True, help="Of comparisons.")
@click.option("--threads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(STEPS), help="Repeatable; models are always made.")
def main(
    results: Path,
    model: Path,
    server: str,
    prompts: Path | None,
    minutes: float,
    large: str,
    small: str,
    tokens: int,
    per_category: int,
    context: int,
    threads: int,
    only: Sequence[str],
) -> None:
    """Measure the GPU that llama.cpp finds, and write what is found to the folder RESULTS."""
    if results.exists() and any(results.iterdir()):
        raise click.BadParameter(f"{results} has files of another run: name a new folder.", param_hint="RESULTS")
    results.mkdir(parents=True, exist_ok=True)
    report = Report(results, minutes * 60, model)
    asked = prompts.absolute() if prompts else None
    amounts = large, small, tokens, per_category, context, threads
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(1) as beside:
        found = which(server)  # programs run in the folder of the results
        binary = str(Path(found).absolute()) if found else server
        setting = Setting(results, Path(made), model.absolute(), asked, binary, *amounts)
        models = beside.submit(report.run, setting.make_models())
        for step in setting.list_steps():
            if step.name != "contract":
                models.result()
            if not only or step.name in only:
                report.run(step)
    print_result("gpu", {"outcomes": report.outcomes}, model)


if __name__ == "__main__":
    main()
