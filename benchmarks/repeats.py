"""Drafts of up to 63 tokens against drafts of up to 15, where text repeats for long and where matches break off.

    uv run python -m benchmarks.repeats [--target T.gguf] [--lines 300] [--tokens 700] [--repeats 3]

The emitted text is given, whatever the target computes: its forwards, and the autopilot's decisions with n-gram lookups
alone, take their real time. Each edit is a file of the standard library, and behind it the same file with one word
renamed, some lines inserted or some cut. Each "breaks" text is made of parts of one file, 5 to 20 or 8 to 40 tokens
long. Arms take turns on each text, in reverse order on every second repeat, and learn from text to text, each for
itself. Times are processor times of the thread that computes, since other programs interrupt long forwards more often
than short ones. "x plain" is the median over repeats. stdout ends with one JSON line.
"""

from __future__ import annotations

import fnmatch
import queue
import random
import re
import sched
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click

import benchmarks.thread_clock  # noqa: F401 - before anything that measures
from benchmarks.harness import MODEL_PATH, TARGET, load_model, print_result
from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.profiler import measure_rows
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.options import LoadOptions
from edgespec.core.loop import speculate
from edgespec.core.protocols import Budget, Controller, Draft, Session, Step, Verdict
from edgespec.core.scores import Scores
from edgespec.drafters.ngram import NgramDrafter
from edgespec.text.tokenizer import Tokenizer

MODULES = (sched, fnmatch, queue)
ARMS = {"plain": 0, "up to 15": 15, "up to 63": 63}
PROFILE_S = 2.0
ROOM = 80  # tokens of the text beyond those that are emitted, so that drafts are not cut at its end


@dataclass(frozen=True)
class Text:
    """Tokens of a prompt and of what is emitted after it."""

    id: str
    prompt: list[int]
    text: list[int]


class Given:
    """Emits `text` after a prompt of `n_prompt` tokens, whatever the scores are; waits for them as a verifier does."""

    def __init__(self, text: Sequence[int], n_prompt: int) -> None:
        self._text = text
        self._n_prompt = n_prompt

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        scores.argmax()
        path: list[int] = []
        start = len(prefix) - self._n_prompt
        while True:
            token = self._text[start + len(path)]
            found = [node for node in draft.children(path[-1] if path else -1) if draft.tokens[node] == token]
            if not found:
                return Verdict(tuple(path), token)
            path.append(found[0])


class Limited(Adaptive):
    """The autopilot with drafts of `most` tokens at most."""

    most = 0

    def propose(self, tokens: Sequence[int], limit: Budget) -> Draft:
        return super().propose(tokens, Budget(min(limit.depth, self.most), min(limit.nodes, self.most)))


def edit(lines: list[str], rng: random.Random, kind: int) -> list[str]:
    """Rename a word, insert lines, or cut some out."""
    if kind == 0:
        word = rng.choice(sorted(set(re.findall(r"\b[a-z_]{5,}\b", "\n".join(lines)))))
        return re.sub(rf"\b{word}\b", f"new_{word}", "\n".join(lines)).split("\n")
    if kind == 1:
        return [more for line in lines for more in ([line, "    # here"] if rng.random() < 0.03 else [line])]
    start = rng.randrange(len(lines) // 2)
    return lines[:start] + lines[start + 5 :]


def make_texts(tokenizer: Tokenizer, n_lines: int, n_tokens: int) -> list[Text]:
    texts = []
    for module in MODULES:
        rng, lines = random.Random(module.__name__), Path(str(module.__file__)).read_text().split("\n")[:n_lines]
        for kind in range(3):
            before, lines = lines, edit(lines, rng, kind)
            prompt, text = (tokenizer.encode("\n".join(each), parse_special=False) for each in (before, lines))
            texts.append(Text(f"edit {module.__name__} {kind + 1}", prompt, text))
    prompt = texts[0].prompt
    for least, most in ((5, 20), (8, 40)):
        rng = random.Random(least)
        parts: list[int] = []
        while len(parts) < n_tokens + ROOM:
            start = rng.randrange(max(1, len(prompt) - most))
            parts += prompt[start : start + rng.randrange(least, most)]
        texts.append(Text(f"breaks {least} to {most}", prompt, parts))
    return texts


def run(session: Session, text: Text, arm: str, stats: DraftStats, n_tokens: int) -> tuple[float, list[int]]:
    """(tokens/s after the first token, drafted tokens of each round)."""
    vocab_size, most = session.capabilities.vocab_size, ARMS[arm]
    controller: Controller = FixedLength([], Budget(0, 0), vocab_size)
    if most:
        controller = limited = Limited([NgramDrafter()], stats, "greedy", vocab_size, trees=True)
        limited.most = most
    n = min(n_tokens, len(text.text) - ROOM)
    verifier = Given(text.text, len(text.prompt))
    events = speculate(session, controller, verifier, text.prompt, max_tokens=n, stop=frozenset())
    first, *steps = [event for event in events if isinstance(event, Step)]
    controller.end()
    tokens = sum(len(step.tokens) for step in steps)
    return tokens / (steps[-1].at_s - first.at_s), [step.n_drafted for step in steps]


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--lines", "n_lines", type=click.IntRange(20), default=300, show_default=True, help="Of each file.")
@click.option("--tokens", type=click.IntRange(16), default=700, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
def main(target: Path, n_lines: int, tokens: int, repeats: int) -> None:
    """Compare the lengths of drafts."""
    model = load_model("llamacpp", target, LoadOptions(threads=1, context_size=32 * n_lines))
    session = model.open_session()
    profile = Profile(measure_rows(session, PROFILE_S))
    stats = {arm: DraftStats(profile) for arm in ARMS}
    results: list[dict[str, Any]] = []
    for text in make_texts(model.tokenizer, n_lines, tokens):
        ratios, most = defaultdict(list), dict.fromkeys(ARMS, 0)
        for repeat in range(repeats):
            speeds = {}
            for arm in list(ARMS)[:: 1 if repeat % 2 == 0 else -1]:
                speeds[arm], drafted = run(session, text, arm, stats[arm], tokens)
                most[arm] = max(most[arm], *drafted)
            for arm, speed in speeds.items():
                ratios[arm].append(speed / speeds["plain"])
        results.append({"text": text.id, "x plain": {arm: round(median(each), 3) for arm, each in ratios.items()}})
        results[-1]["longest"] = most
        click.echo(str(results[-1]), err=True)
    session.close()
    means = {}
    for kind in ("edit", "breaks"):
        rows = [each["x plain"] for each in results if each["text"].startswith(kind)]
        means[kind] = {arm: round(geometric_mean(row[arm] for row in rows), 3) for arm in ARMS}
    print_result("repeats", {"lines": n_lines, "tokens": tokens, "texts": results, "means": means}, target)


if __name__ == "__main__":
    main()
