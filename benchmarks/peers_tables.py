"""The rounds of `benchmarks.peers` as JSON lines, and their tables: all arms, and the autopilot by category.

A ratio is of tokens/s, paired by prompt: of its means over repeats. Ratios of several prompts are geometric means, with
the 95% interval of a bootstrap over prompts. The eight categories of MT-bench count as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

PLAIN, AUTOPILOT = "edgespec plain", "edgespec auto"
ALL = "all"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MIN_TOKENS = 16  # of an answer that may be the slowest: below, a ratio is mostly noise
LEAST = 0.98  # of plain decoding: an answer below has lost
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of one arm.

    tokens   of the answer; None stands for one that was counted but not sent
    later    tokens after the first arrival
    seconds  between the first arrival and the last, as the benchmark measures them; `wall_s` by the clock
    rounds   target forwards after the one that gave the first arrival

    deciding_s and plain_s are those of `Generation`.
    """

    arm: str
    tokens: tuple[int | None, ...]
    later: int
    seconds: float
    wall_s: float
    rounds: int
    drafted: int
    accepted: int
    deciding_s: float = 0.0
    plain_s: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return self.later / self.seconds if self.later and self.seconds else None


@dataclass(frozen=True, slots=True)
class Round:
    """All arms on one prompt, one after the other. `form` is how the prompt was written: 'chat' or 'raw'."""

    form: str
    prompt: str
    category: str
    repeat: int
    runs: tuple[Run, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.form, self.prompt, self.repeat


class Record:
    """The rounds of a run, each a line of the file at `path`, so that an interrupted run goes on where it was.

    The first line has the settings. Without a path nothing is written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Raises click.ClickException where the file has rounds of other settings."""
        self.rounds: list[Round] = []
        self._path = path
        if path is None:
            return
        data = path.read_bytes() if path.exists() else b""
        lines = data[: data.rfind(b"\n") + 1].splitlines()  # an interrupted write has left half a line
        if lines and json.loads(lines[0]) != {"settings": settings}:
            raise click.ClickException(f"{path} has rounds of other settings or programs: name another file.")
        self.rounds += [_read_round(json.loads(line)) for line in lines[1:]]
        kept = [*lines, *([] if lines else [json.dumps({"settings": settings}).encode()])]
        path.write_bytes(b"".join(line + b"\n" for line in kept))

    def has(self, form: str, prompt: str, repeat: int) -> bool:
        return any(each.key == (form, prompt, repeat) for each in self.rounds)

    def add(self, finished: Round) -> None:
        self.rounds.append(finished)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(finished)) + "\n")


def _read_round(fields: dict[str, Any]) -> Round:
    runs = tuple(Run(**{**run, "tokens": tuple(run["tokens"])}) for run in fields.pop("runs"))
    return Round(**fields, runs=runs)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean over prompts, and the ends of its 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm over a group of prompts. Ratios are to its program's own plain decoding, and to the peer's arms.

    tau       tokens per target forward, the first token left out
    accepted  share of the drafted tokens; None where nothing was drafted
    decile    the tenth percentile of the prompts' ratios to own plain decoding
    worst     the lowest of them, of answers of MIN_TOKENS and more
    repeated  share of 4-grams that the same answer has had before
    same      answers that equal edgespec's plain ones
    """

    arm: str
    answers: int
    tokens_per_second: float
    own: Ratio | None
    peer: Ratio | None
    best: Ratio | None
    tau: float | None
    accepted: float | None
    decile: float | None
    worst: float | None
    repeated: float
    same: int


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of a group of prompts. `best` is the peer's fastest arm there, chosen with hindsight."""

    form: str
    name: str
    prompts: int
    best: str | None
    rows: tuple[Row, ...]

    def row(self, arm: str) -> Row | None:
        return next((row for row in self.rows if row.arm == arm), None)


def group_name(category: str) -> str:
    return "mt_bench" if category in MT_BENCH else category


def own_plain(arm: str) -> str:
    """The same program's arm without drafts."""
    return f"{arm.split(' ')[0]} plain"


def summarize(rounds: Sequence[Round]) -> list[Group]:
    """For each form: all prompts, then each category."""
    groups = []
    for form in dict.fromkeys(each.form for each in rounds):
        own = [each for each in rounds if each.form == form]
        names = dict.fromkeys(group_name(each.category) for each in own)
        groups.append(_summarize_group(form, ALL, own))
        if len(names) > 1:
            groups += [_summarize_group(form, n, [r for r in own if group_name(r.category) == n]) for n in names]
    return groups


def _summarize_group(form: str, name: str, rounds: Sequence[Round]) -> Group:
    arms = dict.fromkeys(run.arm for each in rounds for run in each.runs)
    speeds = {arm: _mean_speeds(rounds, arm) for arm in arms}
    peer_plain = next((own_plain(arm) for arm in arms if own_plain(arm) != PLAIN), None)
    peers = [arm for arm in arms if own_plain(arm) == peer_plain]

    def compare(arm: str, other: str | None) -> list[float]:
        if other is None or other not in speeds:
            return []
        return [speed / speeds[other][prompt] for prompt, speed in speeds[arm].items() if prompt in speeds[other]]

    best = max(peers, key=lambda arm: np.mean(np.log(compare(arm, peer_plain) or [1e-9])), default=None)
    rows = []
    for arm in arms:
        own = speeds.get(own_plain(arm), {})
        runs = [run for each in rounds for run in each.runs if run.arm == arm]
        ratios = compare(arm, own_plain(arm))
        long = {each.prompt for each in rounds for run in each.runs if run.arm == arm and run.later >= MIN_TOKENS}
        slow = [speeds[arm][prompt] / own[prompt] for prompt in long & {*own}]
        drafted, forwards = sum(run.drafted for run in runs), sum(run.rounds for run in runs)
        rows.append(
            Row(
                arm=arm,
                answers=len(runs),
                tokens_per_second=float(np.median(list(speeds[arm].values()))) if speeds[arm] else 0.0,
                own=_estimate(ratios),
                peer=_estimate(compare(arm, peer_plain)),
                best=_estimate(compare(arm, best)),
                tau=sum(run.later for run in runs) / forwards if forwards else None,
                accepted=sum(run.accepted for run in runs) / drafted if drafted else None,
                decile=float(np.percentile(ratios, 10)) if ratios else None,
                worst=min(slow, default=None),
                repeated=float(np.mean([repeated_share(run.tokens) for run in runs])),
                same=_count_same(rounds, arm),
            )
        )
    return Group(form, name, len({each.prompt for each in rounds}), best, tuple(rows))


def _mean_speeds(rounds: Iterable[Round], arm: str) -> dict[str, float]:
    """tokens/s by prompt; prompts whose answer is one token have none."""
    found: dict[str, list[float]] = {}
    for each in rounds:
        for run in each.runs:
            if run.arm == arm and run.tokens_per_second:
                found.setdefault(each.prompt, []).append(run.tokens_per_second)
    return {prompt: float(np.mean(values)) for prompt, values in found.items()}


def _estimate(ratios: Sequence[float]) -> Ratio | None:
    if not ratios:
        return None
    values, rng = np.log(ratios), np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return Ratio(float(np.exp(values.mean())), float(low), float(high))


def _count_same(rounds: Iterable[Round], arm: str) -> int:
    count = 0
    for each in rounds:
        by_arm = {run.arm: run.tokens for run in each.runs}
        if arm in by_arm and PLAIN in by_arm:
            a, b = by_arm[arm], by_arm[PLAIN]
            count += len(a) == len(b) and all(None in pair or pair[0] == pair[1] for pair in zip(a, b, strict=True))
    return count


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The autopilot's first answer to a prompt, as multiples of plain decoding. Later ones recite it from the memory.

    own    by its own rounds without a draft and plain decoding's controller; `busy` where there are too few of them
    busy   by the processor's time of both answers
    clock  by the clock
    tau    tokens per target forward
    """

    prompt: str
    own: float
    busy: float
    clock: float
    tau: float
    drafted: int
    accepted: int


def list_first(rounds: Iterable[Round]) -> list[FirstAnswer]:
    """The first answers of MIN_TOKENS and more, the slowest by its own work first."""
    answers = []
    for each in rounds:
        by_arm = {run.arm: run for run in each.runs}
        auto, plain = by_arm.get(AUTOPILOT), by_arm.get(PLAIN)
        if each.repeat or auto is None or plain is None or min(auto.later, plain.later) < MIN_TOKENS:
            continue
        busy = auto.later / auto.seconds / (plain.later / plain.seconds)
        clock = auto.later / auto.wall_s / (plain.later / plain.wall_s)
        own = busy if auto.plain_s is None else auto.later * (auto.plain_s + plain.deciding_s) / auto.wall_s
        counts = auto.later / auto.rounds, auto.drafted, auto.accepted
        answers.append(FirstAnswer(each.prompt, own, busy, clock, *counts))
    return sorted(answers, key=lambda each: each.own)


def format_first(answers: Sequence[FirstAnswer]) -> str:
    """Two tables: what the first answers have in all, and those that are below LEAST by any time."""
    ways = {
        "own rounds": [each.own for each in answers],
        "processor": [each.busy for each in answers],
        "clock": [each.clock for each in answers],
    }
    whole = [
        [way, f"{np.quantile(v, 0.1):.3f}", f"{min(v):.3f}", f"{np.median(v):.3f}", str(sum(x < LEAST for x in v))]
        for way, v in ways.items()
        if v
    ]
    lost = [
        [each.prompt, *map(_text, (each.own, each.busy, each.clock, each.tau)), f"{each.accepted}/{each.drafted}"]
        for each in answers
        if min(each.own, each.busy, each.clock) < LEAST
    ]
    columns = ["times plain by", "worst decile", "slowest", "median", f"below {LEAST}"]
    tables = _format_table(columns, whole), _format_table(["prompt", *ways, "tau", "accepted"], lost)
    return f"{len(answers)} first answers of the autopilot:\n\n{tables[0]}\n\n{tables[1]}\n"


def format_markdown(groups: Sequence[Group]) -> str:
    """For each form a table of all arms, one of the autopilot by category, and one of every arm by category."""
    parts = []
    for form in dict.fromkeys(group.form for group in groups):
        own = [group for group in groups if group.form == form]
        whole = own[0]
        parts.append(f"Prompts written as {form}, {whole.prompts} of them; the peer's best arm is {whole.best or '-'}.")
        parts.append(_format_arms(whole))
        if len(own) > 1:
            parts += ["The autopilot by category:", _format_autopilot(own), "Times own plain decoding, by category:"]
            parts.append(_format_by_arm(own, lambda row: _text(row.own and row.own.mean)))
            parts += ["Tokens per forward (tau), by category:", _format_by_arm(own, lambda row: _text(row.tau))]
    return "\n\n".join(parts) + "\n"


def _format_arms(group: Group) -> str:
    head = ["arm", "tokens/s", "x own plain", "x peer's plain", "x peer's best", "tau", "accepted", "worst decile"]
    head += ["worst answer", "repeated 4-grams", "same text"]
    lines = []
    for row in group.rows:
        cells = [row.arm, f"{row.tokens_per_second:.1f}", _text(row.own), _text(row.peer), _text(row.best)]
        cells += [_text(row.tau), _share(row.accepted), _text(row.decile), _text(row.worst), _share(row.repeated)]
        lines.append([*cells, f"{row.same}/{row.answers}"])
    return _format_table(head, lines)


def _format_autopilot(groups: Iterable[Group]) -> str:
    head = ["category", "prompts", "tau", "accepted", "x own plain", "x peer's plain", "x peer's best", "peer's best"]
    head += ["worst decile", "worst answer", "repeated 4-grams"]
    lines = []
    for group in groups:
        if (row := group.row(AUTOPILOT)) is not None:
            cells = [group.name, str(group.prompts), _text(row.tau), _share(row.accepted), _text(row.own)]
            cells += [_text(row.peer), _text(row.best), group.best or "-", _text(row.decile), _text(row.worst)]
            lines.append([*cells, _share(row.repeated)])
    return _format_table(head, lines)


def _format_by_arm(groups: Sequence[Group], cell: Callable[[Row], str]) -> str:
    arms = [row.arm for row in groups[0].rows if row.arm != own_plain(row.arm)]
    found = [[group.row(arm) for arm in arms] for group in groups]
    lines = [[g.name, *("-" if r is None else cell(r) for r in rows)] for g, rows in zip(groups, found, strict=True)]
    return _format_table(["category", *arms], lines)


def _format_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def _text(value: Ratio | float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def repeated_share(tokens: Sequence[int | None], n: int = 4) -> float:
    """The share of a text's n-grams that it has had before; None, an unknown token, is in no n-gram."""
    grams = [gram for i in range(len(tokens) - n + 1) if None not in (gram := tuple(tokens[i : i + n]))]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
