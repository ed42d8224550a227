"""Progress on stderr: bars of downloads and loading, notices, rounds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from edgespec.errors import make_harmless
from edgespec.files import save_traceback

if TYPE_CHECKING:
    from edgespec.core.protocols import Step


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
        """Show the bar of this name in place of another one, with `detail` after it. It ends when `done` reaches
        `total`.
        """
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
    width = max([12, *(len(step.decision.drafter) for step in rounds if step.decision)])
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
            f"{step.index:5}  {decision.drafter:{width}}  {step.n_drafted:7}  {step.n_accepted:8}"
            f"   {tokens:>4} → {len(step.tokens):<4} {expected_ms:>7} → {took_ms:<7.1f} {decision.reason}"
        )
    return lines


def report_bug(error: Exception) -> None:
    """Print an internal error in one sentence and the file that holds its traceback."""
    click.echo(f"error: Internal error: {type(error).__name__}: {error}.", err=True)
    click.echo(f"hint: Please report it, with {save_traceback(error)}.", err=True)
