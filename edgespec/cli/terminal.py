"""Terminal output: progress bars of downloads and loading, notices, statistics."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from edgespec.errors import CacheError, Cancelled, InvalidRequest, make_harmless, reason_of
from edgespec.files import replace_file, save_traceback

if TYPE_CHECKING:
    from edgespec.core.protocols import Step
    from edgespec.service.client import Stream


class TerminalReporter:
    """A Reporter that draws progress bars on stderr if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._bar_name = ""

    def notice(self, text: str) -> None:
        self.end_bar()
        click.echo(f"note: {make_harmless(text)}", err=True)

    def download(self, name: str, done: int, total: int) -> None:
        self.draw(name, done, total)

    def loading(self, name: str, fraction: float) -> None:
        self.draw(f"loading {name}", round(fraction * 1000), 1000)

    def draw(self, name: str, done: int, total: int, detail: str | None = None) -> None:
        """Show the bar of this name in place of another one, with `detail` after it; it ends with `total`."""
        if sys.stderr is None or not sys.stderr.isatty():
            return
        if name != self._bar_name or (self._bar is None and done < total):
            self.end_bar()
            self._bar_name = name
            self._bar = click.progressbar(
                length=max(total, 1), label=name, file=sys.stderr, show_pos=False, item_show_func=lambda text: text,
                width=0,  # as wide as the terminal
            )  # fmt: skip
        if self._bar is None:
            return
        self._bar.length = max(total, 1)  # a training is fitted to its time while it runs
        self._bar.update(done - self._bar.pos, detail)
        if done >= total:
            self.end_bar()

    def end_bar(self) -> None:
        """Leave the bar as it is, for what is written next."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None


def report_activity(text: str) -> None:
    """Show on stderr what is being done, in place of the text before; an empty text removes it. For terminals only."""
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def format_speed(tpot_s: float, step_p99_s: float) -> str:
    """Tokens/s, and its times: the mean of a token, and the 99th percentile of a step, which may emit several."""
    return f"{1 / tpot_s:.1f} tok/s ({1000 * tpot_s:.1f} ms a token, p99 of a step {1000 * step_p99_s:.1f} ms)"


def explain_rounds(steps: Iterable[Step]) -> list[str]:
    """A table of rounds: drafted and accepted tokens, expected and actual tokens and milliseconds, and the reason."""
    rounds = list(steps)
    width = max([12, *(len(step.decision.source) for step in rounds if step.decision)])
    lines = [
        f"{'':{width + 28}}expected → actual",
        f"round  {'drafter':{width}}  drafted  accepted   tokens        ms           why",
    ]
    for step in rounds:
        decision = step.decision
        if decision is None:  # the first token, from prefill
            continue
        took_ms = 1000 * (step.draft_s + step.verify_s + step.sample_s + step.commit_s)
        tokens = "-" if decision.expected_tokens is None else f"{decision.expected_tokens:.1f}"
        expected_ms = "-" if decision.expected_s is None else f"{1000 * decision.expected_s:.1f}"
        lines.append(
            f"{step.index:5}  {decision.source:{width}}  {step.n_drafted:7}  {step.n_accepted:8}"
            f"   {tokens:>4} → {len(step.tokens):<4} {expected_ms:>7} → {took_ms:<7.1f} {decision.reason}"
        )
    return lines


def report_bug(error: Exception) -> None:
    """Print an internal error in one sentence and the file that holds its traceback."""
    click.echo(f"error: Internal error: {type(error).__name__}: {error}.", err=True)
    click.echo(f"hint: Please report it, with {save_traceback(error)}.", err=True)


# Results, as tables or as JSON.


def print_result(facts: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print `facts` as JSON if that is wanted, else `lines`, which are not made before."""
    for line in [json.dumps(facts, ensure_ascii=False)] if as_json else lines:
        click.echo(line)


def format_table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    """The rows in aligned columns, those of `right` to the right; on a terminal the last column ends at its width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
    for row in rows:
        cells = [
            each.rjust(width) if i in right else each.ljust(width)
            for i, (each, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        yield line if room is None else shorten(line, room)


def format_groups(
    rows: Sequence[Sequence[str]], groups: Sequence[str], titles: Mapping[str, str], right: frozenset[int]
) -> Iterator[str]:
    """`format_table` with a title above the first row of each group; `groups` are those of the rows."""
    shown = groups[0]
    for line, group in zip(format_table(rows, right), groups, strict=True):
        if group != shown:
            yield titles[group]
        shown = group
        yield line


def format_time(seconds: float) -> str:
    """A time since 1970 as a local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def require_new(file: Path, *, force: bool) -> None:
    """Raise InvalidRequest for a file that exists, unless `force`."""
    if file.exists() and not force:
        raise InvalidRequest(f"'{file}' exists.", hint="Name another one, or use --force.")


@contextmanager
def open_output(file: Path, *, force: bool) -> Iterator[TextIO]:
    """Open a text file that only its user can read, and that replaces `file` once the block has ended without an error.

    '-' is stdout. Raises InvalidRequest for a file that exists, unless `force`, and CacheError.
    """
    if str(file) == "-":
        yield sys.stdout
        return
    require_new(file, force=force)
    try:
        with replace_file(file, 0o600) as partial, partial.open("w", encoding="utf-8") as out:
            yield out
    except OSError as error:
        hint = "Free some space, or name a folder that can be written."
        raise CacheError(f"'{file}' cannot be written: {reason_of(error)}.", hint=hint) from error


def write_lines(file: Path, facts: Iterable[object], *, force: bool) -> int:
    """Write each of `facts` as a line of JSON; returns their number. Raises what `open_output` raises."""
    n = 0
    with open_output(file, force=force) as out:
        for n, each in enumerate(facts, 1):  # noqa: B007 - the number of the last one
            out.write(json.dumps(each, ensure_ascii=False) + "\n")
    return n


# Ctrl-C while a job runs: the first press cancels the job, the second ends the program.


T = TypeVar("T")

INTERRUPTED = 130  # the shells' exit code for Ctrl-C


class Presses:
    """Counts the presses of Ctrl-C. A parent that waits for this process passes on those that it gets, and may have got
    the same ones: there were as many as the larger of both numbers.
    """

    def __init__(self) -> None:
        self._received = 0  # by this process, those that were passed on among them
        self._passed_on = 0
        self._known = 0

    def pass_on(self) -> None:
        """The parent has got a SIGINT."""
        self._passed_on += 1
        os.kill(os.getpid(), signal.SIGINT)

    def is_new(self) -> bool:
        """Whether the SIGINT that has come is another press, not a copy of one."""
        self._received += 1
        before, self._known = self._known, max(self._known, self._passed_on, self._received - self._passed_on)
        return self._known > before


PRESSES = Presses()


def finish(stream: Stream[Any]) -> None:
    """Let `stream` end, as `interruptible` does. Raises Cancelled also where SIGINT came too late to end it early."""
    events = interruptible(stream)
    while True:
        try:
            next(events)
        except StopIteration as end:
            if end.value:
                raise Cancelled from None
            return


def interruptible(stream: Stream[T]) -> Generator[T, None, bool]:
    """Events of `stream`. Until it ends, SIGINT cancels it, and another one ends this process; it is cancelled too when
    its reader leaves. Returns whether SIGINT came.

    The handler only sets a flag, so it is safe during native calls.
    """
    is_pressed = False

    def on_interrupt(_signal: int, _frame: object) -> None:
        nonlocal is_pressed
        if not PRESSES.is_new():
            return
        if is_pressed:
            sys.stdout.flush()
            os._exit(INTERRUPTED)  # a native forward cannot be interrupted in another way
        is_pressed = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield from stream
    finally:
        signal.signal(signal.SIGINT, before)
        stream.cancel()
    return is_pressed
