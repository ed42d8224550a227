"""`edgespec adapt`: train the draft of a model on one's own texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from edgespec.cancel import Check, cancellable, current_check
from edgespec.cli.completion import complete_model
from edgespec.cli.options import FloatRange, json_option, load_config, load_options, offer, open_hub, rare_option
from edgespec.cli.output import format_table, print_result
from edgespec.cli.terminal import TerminalReporter
from edgespec.errors import Cancelled, InvalidRequest, UnknownModel
from edgespec.options import DRAFT
from edgespec.progress import reporting
from edgespec.train.options import WEIGHTS, TrainOptions
from edgespec.units import count

if TYPE_CHECKING:
    from edgespec.models.versions import AdaptedDrafts, AdaptedPair, Card, Gain
    from edgespec.train.run import Adaptation


_TRAIN = "train"


class _Adapt(click.Group):
    """A group that runs `train` if the first word names no subcommand, so that `edgespec adapt MODEL` trains."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_command = args[0] in (*self.commands, "--help", "-h") if args else ctx.resilient_parsing
        return super().parse_args(ctx, args if is_command else [_TRAIN, *args])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The subcommands, and what `train` takes."""
        train = self.commands[_TRAIN]
        context = click.Context(train, parent=ctx)
        if incomplete.startswith("-"):
            return train.shell_complete(context, incomplete)
        commands, models = super().shell_complete(ctx, incomplete), complete_model(context, train.params[0], incomplete)
        return [*commands, *(each for each in models if each.type == "plain" or not commands)]


@click.group("adapt", cls=_Adapt)
def adapt_command() -> None:
    """Train the draft of a model on what it has answered on this machine.

    `edgespec adapt [MODEL]` trains: `edgespec adapt train --help` has its options. The texts are those of `edgespec
    memory`. A trained draft is kept only if it predicts answers that were held out better. It changes the speed of
    answers and never their text.
    """


_method_option = click.option("--method", metavar="NAME", help="How the draft drafts, such as model or eagle3.")
_NONE = "No draft is adapted yet; `edgespec adapt MODEL` adapts the one of a model."


def open_drafts() -> AdaptedDrafts:
    from edgespec.folders import adapted_folder
    from edgespec.models.versions import AdaptedDrafts

    return AdaptedDrafts(adapted_folder())


def describe_gain(gain: Gain) -> dict[str, Any]:
    return {
        "tokens_before": gain.before,
        "tokens_after": gain.after,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "held_out_conversations": gain.n_conversations,
    }


@adapt_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the adapted drafts; a star marks the version of a model that is in use."""
    rows = [row for pair in open_drafts().pairs() for row in _describe_versions(pair)]
    table = [("", "VERSION", "DATE", "TOKENS", "TOKENS A ROUND", "BEFORE", "GAIN", "MODEL", "DRAFT")]
    for row in rows:
        mark, version = "*" if row["active"] else "", str(row["version"])
        if "model" not in row:
            table.append((mark, version, "damaged", "", "", "", "", "", ""))
            continue
        table.append((
            mark, version, row["date"], f"{row['tokens']:,}", f"{row['tokens_after']:.2f}",
            f"{row['tokens_before']:.2f}", f"{row['gain_low']:+.2f} to {row['gain_high']:+.2f}", row["model"],
            row["draft"],
        ))  # fmt: skip
    print_result(rows, format_table(table, frozenset({3, 4, 5})) if rows else [_NONE], as_json=as_json)


def _describe_versions(pair: AdaptedPair) -> Iterator[dict[str, Any]]:
    active = pair.active_number()
    for version, card in pair.versions().items():
        row: dict[str, Any] = {"version": version, "active": version == active, "path": str(pair.folder / str(version))}
        if card is not None:
            row |= {"model": card.target, "draft": card.base, "date": card.date, "tokens": card.n_tokens}
            row |= {"minutes": card.minutes, **describe_gain(card.gain)}
        yield row


@adapt_command.command("use")
@click.argument("version", type=click.IntRange(0))
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
@_method_option
def use_command(version: int, model: str | None, method: str | None) -> None:
    """Draft with VERSION from now on; 0 is the draft before any training.

    Running engines change to it after the answers that they are giving.
    """
    pair = _find_pair(model, method)
    pair.use(version)
    click.echo(f"{_name_target(pair) or 'the model'} drafts with {_name_version(version)}")


def _name_version(version: int) -> str:
    return f"version {version}" if version else "the draft before any training"


def _find_pair(model: str | None, method: str | None) -> AdaptedPair:
    """The versions for a target, which may be left out if there is only one. Raises UnknownModel, InvalidRequest."""
    pairs = {pair: _read_card(pair) for pair in open_drafts().pairs()}
    known = {pair: card for pair, card in pairs.items() if card and method in (None, card.method)}
    found = [pair for pair, card in known.items() if model in (None, card.target)]
    damaged = [pair for pair, card in pairs.items() if card is None]  # it is not known whose they are
    if not found and model is None and len(damaged) == 1:
        return damaged[0]
    if not found:
        of, hint = "" if model is None else f" of {model}", "`edgespec adapt list` shows those that are."
        if damaged:
            hint = f"The cards in {damaged[0].folder} are damaged: remove the folder to train anew."
        raise UnknownModel(f"no draft{of} is adapted.", hint=hint)
    if len(found) > 1:
        cards = [card for pair, card in known.items() if pair in found]
        names = ", ".join(sorted(f"{card.target} --method {card.method}" for card in cards))
        raise InvalidRequest("several drafts are adapted.", hint=f"Name one: {names}.")
    return found[0]


def _read_card(pair: AdaptedPair) -> Card | None:
    """The card of the newest version; None if all cards are damaged."""
    return next((card for card in reversed(list(pair.versions().values())) if card is not None), None)


def _name_target(pair: AdaptedPair) -> str | None:
    """The name of the target; None if all cards are damaged."""
    card = _read_card(pair)
    return None if card is None else card.target


@adapt_command.command(_TRAIN)
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
@offer(DRAFT, help="The draft model to train. [default: the one that is paired with MODEL]", show_default=False)
@click.option(
    "--method",
    type=click.Choice(WEIGHTS),
    help="Train all weights, or low-rank changes of them. [default: all, where that takes less than 1 GiB]",
)
@rare_option("--epochs", type=click.IntRange(1, 1000), default=3, help="Times to read the texts.")
@rare_option("--learning-rate", type=FloatRange(1e-8, 1), default=TrainOptions().learning_rate)
@click.option("--minutes", type=FloatRange(0.1), help="Take no longer than this, all in all.")
@click.option("--documents/--no-documents", default=True, help="Learn from added documents too.")
@rare_option(
    "--newest",
    is_flag=True,
    help="Train on the newest texts, from the version that predicts them best, as --learn does.",
)
@click.option("--parent", type=int, hidden=True, help="End with the process that has this id.")
@rare_option("--on-battery", is_flag=True, help="Train on battery power too.")
@click.option("--yes", is_flag=True, help="Do not ask before texts are first used for training.")
@json_option
@load_options
def train_command(
    model: str | None,
    method: Any,
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
    from edgespec.cli.engine import run_work
    from edgespec.folders import memory_folder
    from edgespec.train.learn import is_on_battery
    from edgespec.train.options import Allowance, Throttle, lower_priority
    from edgespec.train.run import AdaptConfig, Adapter, plan_training
    from edgespec.train.trainee import notice_slow_blas

    train = TrainOptions(learning_rate=learning_rate, epochs=epochs)
    limit_s = inf if minutes is None else 60 * minutes
    throttle = Throttle(Allowance(limit_s), must_stop=(lambda: False) if on_battery else is_on_battery)
    config = AdaptConfig(load_config(model, options), method, train, documents, throttle, newest)
    (registry, hub), drafts, reporter = open_hub(), open_drafts(), TrainingReporter()
    with reporting(reporter):
        planned = plan_training(config, registry, hub)
    _ask_consent(drafts, yes)
    lower_priority()

    def work() -> Iterator[Adaptation]:
        notice_slow_blas()
        with cancellable(_with_leave(parent, drafts)):
            done = Adapter(registry, hub, drafts, reporter, memory_folder()).run(config, planned)
        yield done

    (done,) = run_work(work, reporter, is_training=True)
    print_result(describe_result(done), [format_result(done)], as_json=as_json)
    if not as_json and done.stopped is not None:
        click.echo("note: The training ended early: the time was up.", err=True)
    if not as_json and done.returned is not None:
        draft, gain = _name_version(done.returned.version), _format_gain(done.returned.gain)
        click.echo(f"note: {draft} is used again: {gain}", err=True)


def _with_leave(parent: int | None, drafts: AdaptedDrafts) -> Check:
    """Return the present check, which also raises Cancelled once the process `parent` is not the parent of this one.

    It raises InvalidRequest once the texts may no longer be trained on.
    """
    from edgespec.models.versions import may_train

    check = current_check()

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
    """Ask once whether texts may be trained on. Raises InvalidRequest if nobody can answer, and for a no."""
    from edgespec.models.versions import allow_training, may_train

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


class TrainingReporter(TerminalReporter):
    """Draws the progress of a training on stderr if that is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: float | None = None

    def writing(self, share: float, n: int) -> None:
        self.draw("the target writes texts", round(1000 * share), 1000, f"{n:,} tokens")

    def reading(self, done: int, total: int) -> None:
        self.draw("the target reads the texts", done, total)

    def training(self, step: int, n_steps: int, loss: float, tokens: float | None) -> None:
        self._tokens = tokens or self._tokens
        held_out = "" if self._tokens is None else f", {self._tokens:.2f} tokens a round"
        self.draw("training", step, n_steps, f"loss {loss:.3f}{held_out}")


def describe_result(done: Adaptation) -> dict[str, Any]:
    return {
        "kept": done.card is not None,
        "version": None if done.card is None else done.card.version,
        "stopped": done.stopped,
        "goes_on": done.goes_on,
        "returned": None if done.returned is None else done.returned.version,
        **describe_gain(done.gain),
    }


def format_result(done: Adaptation) -> str:
    if done.card is not None:
        return f"kept as version {done.card.version}: {_format_gain(done.gain, done.base)}"
    unused, rest = "discarded", "what was in use stays"
    if done.goes_on:
        unused, rest = "not used yet", "the same command trains the head further"
    return f"{unused}, because no gain is certain: {_format_gain(done.gain, done.base)}; {rest}"


def _format_gain(gain: Gain, base: str = "") -> str:
    conversations = count(gain.n_conversations, "held-out conversation")
    return (
        f"{gain.after:.2f} tokens a round in {conversations}, {base or 'before'} {gain.before:.2f}"
        f" (gain {gain.low:+.2f} to {gain.high:+.2f})"
    )
