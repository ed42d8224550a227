"""`edgespec adapt`: train the draft of a model on one's own texts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.adapt.options import LOSS_NAMES, WEIGHTS, TrainOptions
from edgespec.cli.adapt_versions import (
    data_command,
    describe_gain,
    list_command,
    open_drafts,
    revert_command,
    use_command,
)
from edgespec.cli.completers import complete_model
from edgespec.cli.options import draft_option, load_config, load_options, rare_option
from edgespec.cli.terminal import TerminalReporter
from edgespec.units import count

if TYPE_CHECKING:
    from edgespec.adapt.course import Return
    from edgespec.adapt.run import Adaptation
    from edgespec.core.protocols import CheckCancelled
    from edgespec.registry.adapted import AdaptedDrafts, Gain

_TRAIN = "train"


class _Adapt(click.Group):
    """`edgespec adapt MODEL` trains; other words than the subcommands' are arguments of that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._complete(args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, self._complete(args))

    def _complete(self, args: list[str]) -> list[str]:
        return args if args and (args[0] in self.commands or args[0] in ("--help", "-h")) else [_TRAIN, *args]


@click.group("adapt", cls=_Adapt)
def adapt_command() -> None:
    """Train the draft of a model on what it has answered on this machine.

    `edgespec adapt [MODEL]` trains: `edgespec adapt train --help` has its options. The texts are those of `edgespec
    memory`. A trained draft is kept only if it predicts answers that were held out better. It changes the speed of
    answers and never their text.
    """


for _command in (list_command, use_command, revert_command, data_command):
    adapt_command.add_command(_command)


@adapt_command.command(_TRAIN)
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
@draft_option("The draft model to train. [default: the one that is paired with MODEL]")
@click.option(
    "--method",
    type=click.Choice(WEIGHTS),
    help="Train all weights, low-rank changes of them, or, of a PARD model, which tokens follow which. [default: all, "
    "where that takes less than 1 GiB]",
)
@rare_option("--loss", type=click.Choice(LOSS_NAMES), default="forward-kl", show_default=True, help="What to minimize.")
@rare_option("--epochs", type=click.IntRange(1, 1000), default=3, show_default=True, help="Times to read the texts.")
@rare_option("--learning-rate", type=float, default=TrainOptions().learning_rate, show_default=True)
@click.option("--minutes", type=click.FloatRange(0.1), help="Train no longer than this.")
@click.option("--documents/--no-documents", default=True, show_default=True, help="Learn from added documents too.")
@rare_option(
    "--newest",
    is_flag=True,
    help="Train on the newest texts, from the version that predicts them best, as --learn does.",
)
@click.option("--parent", type=int, hidden=True, help="End with the process that has this id.")
@rare_option("--on-battery", is_flag=True, help="Train on battery power too.")
@click.option("--yes", is_flag=True, help="Do not ask before texts are first used for training.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
def train_command(
    model: str | None,
    method: Any,
    loss: Any,
    epochs: int,
    learning_rate: float,
    minutes: float | None,
    documents: bool,
    newest: bool,
    parent: int | None,
    on_battery: bool,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the draft of MODEL on the texts of the memory, and keep it if it gains.

    Training pauses while a model answers on this machine. Ctrl-C stops it; the same command goes on.
    """
    from math import inf

    from edgespec.adapt.course import AllTexts, NewestTexts
    from edgespec.adapt.pace import Pace, lower_priority
    from edgespec.adapt.run import AdaptConfig, Adapter
    from edgespec.cli.engine import run_training
    from edgespec.conversations.memory import memory_folder
    from edgespec.hub.hub import Hub
    from edgespec.registry.schema import load_registry
    from edgespec.service.power import is_on_battery

    train = TrainOptions(loss, learning_rate, epochs)
    limit_s = inf if minutes is None else 60 * minutes
    pace = Pace(limit_s, must_stop=(lambda: False) if on_battery else is_on_battery)
    course = NewestTexts() if newest else AllTexts()
    config = AdaptConfig(load_config(model, options), method, train, documents, pace, course)
    drafts = open_drafts()
    _ask_consent(drafts, yes)
    reporter = _Reporter()
    lower_priority()

    def work(check: CheckCancelled) -> Iterator[Adaptation]:
        check = _with_leave(check, parent, drafts)
        yield Adapter(load_registry(), Hub.from_environment(), memory_folder(), drafts, reporter, check).run(config)

    (done,) = run_training(work)
    if as_json:
        click.echo(json.dumps(_describe_result(done)))
        return
    if done.stopped is not None:
        reason = "the time was up" if done.stopped == "time" else "the machine runs on battery"
        click.echo(f"note: The training ended early: {reason}.", err=True)
    if done.returned is not None:
        click.echo(f"note: {_format_return(done.returned)}", err=True)
    click.echo(_format_result(done))


def _with_leave(check: CheckCancelled, parent: int | None, drafts: AdaptedDrafts) -> CheckCancelled:
    """`check` that also raises Cancelled once the process `parent` is not the parent of this one.

    It raises InvalidRequest once the texts may no longer be trained on.
    """
    from edgespec.errors import Cancelled, InvalidRequest
    from edgespec.registry.consent import may_train

    def check_all() -> None:
        check()
        if parent is not None and os.getppid() != parent:
            raise Cancelled
        if not may_train(drafts.folder):
            raise InvalidRequest(
                "the training ended, because its texts may no longer be trained on.",
                hint="`edgespec adapt` asks again.",
            )

    return check_all


def _ask_consent(drafts: AdaptedDrafts, yes: bool) -> None:
    """Ask once whether texts may be trained on. Raises InvalidRequest where nobody can answer, and for a no."""
    from edgespec.errors import InvalidRequest
    from edgespec.registry.consent import allow_training, may_train

    if may_train(drafts.folder):
        return
    if not yes:
        click.echo(
            "The draft will be trained on the texts that `edgespec memory status` shows: your prompts, answers and"
            " documents. They and the draft stay on this machine. The draft may give away parts of them to"
            " whoever gets its file.",
            err=True,
        )
        can_ask = sys.stdin is not None and sys.stdin.isatty()
        if not can_ask or not click.confirm("Train on these texts?", err=True):
            raise InvalidRequest("nothing was trained.", hint="Use --yes to train on the texts of the memory.")
    allow_training(drafts.folder)


class _Reporter(TerminalReporter):
    """Draws the progress of a training on stderr if that is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: float | None = None

    def reading(self, done: int, total: int) -> None:
        self._draw("the target reads the texts", done, total)

    def training(self, step: int, n_steps: int, loss: float, tokens: float | None) -> None:
        self._tokens = tokens or self._tokens
        held_out = "" if self._tokens is None else f", {self._tokens:.2f} tokens a round"
        self._draw("training", step, n_steps, f"loss {loss:.3f}{held_out}")


def _describe_result(done: Adaptation) -> dict[str, Any]:
    return {
        "kept": done.card is not None,
        "version": None if done.card is None else done.card.version,
        "stopped": done.stopped,
        "returned": None if done.returned is None else done.returned.version,
        **describe_gain(done.gain),
    }


def _format_return(returned: Return) -> str:
    draft = f"version {returned.version}" if returned.version else "the draft before any training"
    return f"{draft} is used again: {_format_gain(returned.gain)}"


def _format_result(done: Adaptation) -> str:
    if done.card is not None:
        return f"kept as version {done.card.version}: {_format_gain(done.gain)}"
    return f"discarded, because no gain is certain: {_format_gain(done.gain)}; the draft in use stays"


def _format_gain(gain: Gain) -> str:
    conversations = count(gain.n_conversations, "held-out conversation")
    return (
        f"{gain.after:.2f} tokens a round in {conversations}, before {gain.before:.2f}"
        f" (gain {gain.low:+.2f} to {gain.high:+.2f})"
    )
