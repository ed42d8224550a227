"""The host's time for each visited row of logits: its distribution, and a token chosen from it. No model is loaded.

    uv run python -m benchmarks.host_time [--vocabulary 152064] [--rows 1,4] [--repeats 12]

Every time is that of one `SampleMatching.verify`, divided by the rows that it visits: one row, or a drafted chain that
is accepted as a whole. The rows are written just before, as a runtime does. Chains take turns of eight sets of rows.
Peaked rows have thirty logits far above the others; broad ones are normally distributed with a deviation of 3. Grammar
rows lie within a string of a JSON schema, over a vocabulary of made-up words; penalties see the last 64 of 500 tokens.
stdout ends with one JSON line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np

from benchmarks.harness import print_result
from edgespec.core.arrays import Logits
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import HostScores
from edgespec.core.verify import SampleMatching, TargetDistribution
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.grammar_mask import GrammarMask
from edgespec.engine.structure import json_structure

COMMON = SamplingParams(temperature=0.8, top_k=40, top_p=0.95)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1}
GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
CHAINS = {
    "greedy": GREEDY,
    "temperature 0.8": WARM,
    "top-k 20, top-p 0.95": replace(COMMON, top_k=20),
    "top-k 40, top-p 0.95": COMMON,
    "top-p 0.95": replace(WARM, top_p=0.95),
    "min-p 0.05": replace(WARM, min_p=0.05),
    "typical 0.95": replace(WARM, typical_p=0.95),
    "greedy, penalties": replace(GREEDY, **PENALTIES),
    "temperature 0.8, penalties": replace(WARM, **PENALTIES),
    "top-k 40, top-p 0.95, penalties": replace(COMMON, **PENALTIES),
}
MASKED = {
    "greedy, grammar": GREEDY,
    "temperature 0.8, grammar": WARM,
    "top-k 40, top-p 0.95, grammar": COMMON,
}
SETS = 8
SEED = 1
ANSWER = b'{"name": "'


class MadeUpWords:
    """A vocabulary of bytes and words; the last id ends the answer."""

    bos: int | None = None
    eos: int | None = None
    add_bos = False

    def __init__(self, vocab_size: int) -> None:
        self._pieces = [*(bytes([i]) for i in range(256)), *(_spell(i) for i in range(vocab_size - 257)), b""]
        self.end_of_generation = self.control_tokens = frozenset({vocab_size - 1})

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def special_text(self, token: int) -> str:
        return f"<|{token}|>"


def _spell(number: int) -> bytes:
    letters = b"etaoinshrdlucmfwypvbgkjqxz"
    word, number = b" ", number + 26
    while number:
        number, letter = divmod(number, 26)
        word += letters[letter : letter + 1]
    return word if len(word) % 2 else word[1:]


@dataclass(frozen=True)
class Case:
    """A chain over sets of rows [n, V], each with the draft that it accepts as a whole."""

    logits: str
    chain: str
    sets: Sequence[tuple[Logits, Draft]]
    verifier: SampleMatching
    prefix: Sequence[int]

    def time_row(self, at: int, outputs: Logits) -> float:
        """Seconds that one row of set `at` takes, which is written to `outputs` first."""
        rows, draft = self.sets[at]
        np.copyto(outputs, rows)
        scores = HostScores(list(outputs))
        start_s = perf_counter()
        verdict = self.verifier.verify(draft, scores, self.prefix)
        elapsed_s = perf_counter() - start_s
        if len(verdict.path) != len(draft):
            raise click.ClickException(f"{self.chain}: the draft was not accepted.")
        return elapsed_s / len(rows)


@click.command()
@click.option("--vocabulary", default="32000,128256,152064,262144", show_default=True, help="Sizes.")
@click.option("--rows", default="1,4", show_default=True, help="Rows that are visited.")
@click.option("--repeats", type=click.IntRange(1), default=12, show_default=True)
def main(vocabulary: str, rows: str, repeats: int) -> None:
    """Time all chains over rows of random logits."""
    results = []
    click.echo(f"{'V':>8} {'logits':7} {'chain':32} {'rows':>4}  us a row: median (least, most)", err=True)
    for vocab_size in map(int, vocabulary.split(",")):
        for n_rows in map(int, rows.split(",")):
            cases = list(make_cases(vocab_size, n_rows))
            times: list[list[float]] = [[] for _ in cases]
            outputs = np.empty((n_rows, vocab_size), np.float32)
            for _ in range(repeats):
                for case, us in zip(cases, times, strict=True):
                    us.extend(1e6 * case.time_row(at, outputs) for at in range(SETS))
            for case, us in zip(cases, times, strict=True):
                names = f"{vocab_size:8} {case.logits:7} {case.chain:32} {n_rows:4}"
                click.echo(f"{names}  {median(us):8.1f} ({min(us):.1f}, {max(us):.1f})", err=True)
                result = {"vocabulary": vocab_size, "logits": case.logits, "chain": case.chain, "rows": n_rows}
                results.append({**result, "us": [round(value(us), 1) for value in (min, median, max)]})
    print_result("host_time", {"repeats": repeats, "results": results})


def make_cases(vocab_size: int, n_rows: int) -> Iterator[Case]:
    rng = np.random.default_rng(SEED)
    before = rng.integers(0, vocab_size, 500).tolist()
    compiler = GrammarCompiler(MadeUpWords(vocab_size))
    structure = json_structure({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    for name in ("peaked", "broad"):
        sets = [make_rows(rng, name, vocab_size, n_rows) for _ in range(SETS)]
        for chain, params in CHAINS.items():
            yield make_case(name, chain, sets, Sampler(params, vocab_size), before)
        for chain, params in MASKED.items():
            masked = GrammarMask(compiler.compile(structure).result(), Sampler(params, vocab_size), len(before))
            yield make_case(name, chain, sets, masked, [*before, *ANSWER])


def make_rows(rng: np.random.Generator, name: str, vocab_size: int, n_rows: int) -> Logits:
    """Logits [n_rows, V]."""
    rows: Logits = (rng.standard_normal((n_rows, vocab_size)) * (2 if name == "peaked" else 3)).astype(np.float32)
    if name == "peaked":
        for row in rows:
            row[rng.integers(0, vocab_size, 30)] = rng.uniform(10, 22, 30)
    return rows


def make_case(
    name: str, chain: str, sets: Sequence[Logits], distribution: TargetDistribution, prefix: list[int]
) -> Case:
    verifier = SampleMatching(distribution, CounterRng(SEED))
    drafts = []
    for rows in sets:
        tokens: list[int] = []
        for row in rows[:-1]:
            tokens.append(verifier.verify(NO_DRAFT, HostScores([row]), [*prefix, *tokens]).next_token)
        drafts.append(Draft.chain(tokens))
    return Case(name, chain, list(zip(sets, drafts, strict=True)), verifier, prefix)


if __name__ == "__main__":
    main()
