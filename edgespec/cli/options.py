"""Options that several commands share, and the objects built from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from edgespec import options
from edgespec.cli.completion import complete_model
from edgespec.errors import InvalidRequest
from edgespec.options import Option
from edgespec.units import parse_duration

if TYPE_CHECKING:
    from edgespec.backends import BackendName
    from edgespec.models.hub import Hub
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

_SHOWS_ALL = "help_all"


class FloatRange(click.FloatRange):
    """A range of numbers, to which NaN does not belong."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class RareOption(click.Option):
    """An option that `--help` leaves out and `--help-all` shows."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.meta.get(_SHOWS_ALL) else None


rare_option = partial(click.option, cls=RareOption)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
model_argument = click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
model_option = click.option("--model", "-m", "named_model", metavar="REF", help="The same as REF.",
                            shell_complete=complete_model)  # fmt: skip
force_option = click.option("--force", is_flag=True, help="Replace FILE if it exists.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def _use_preset(context: click.Context, _param: click.Parameter, name: str | None) -> None:
    """Have the settings of a preset be the defaults of the command's options."""
    if name is not None and not context.resilient_parsing:
        from edgespec.chat.presets import read_preset

        context.default_map = {**(context.default_map or {}), **read_preset(name)}


def _complete_preset(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from edgespec.chat.presets import list_presets

    return [CompletionItem(name) for name in list_presets() if name.startswith(incomplete)]


preset_option = click.option("--preset", metavar="NAME", is_eager=True, expose_value=False, callback=_use_preset,
                             help="Begin with a system message and settings that /preset save NAME has kept.",
                             shell_complete=_complete_preset)  # fmt: skip


def confirm(question: str) -> None:
    """Ask before something is removed. Raises Abort for a no on a terminal, InvalidRequest for any other end."""
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise InvalidRequest("nothing was removed.", hint="Use --yes to remove it without a question.") from None


def add_help_all(command: click.Command, name: str) -> None:
    """Give a command with rare options `--help-all`, which the last line of its help names."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if not any(isinstance(each, RareOption) for each in options):
        return
    if not any(each.name == _SHOWS_ALL for each in options):
        flag = RareOption(
            ["--help-all", _SHOWS_ALL], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
            help="Show all options and exit.",
        )  # fmt: skip
        options.append(flag)
        command.params.append(flag)
    command.epilog = f"{command.epilog or ''}\n\n`edgespec {name} --help-all` shows all {len(options)} options."


def show_all_options(context: click.Context) -> None:
    """Have the help of `context` contain rare options."""
    context.meta[_SHOWS_ALL] = True


def _show_all(context: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        show_all_options(context)
        click.echo(context.get_help(), color=context.color)
        context.exit()


def read_duration(value: str) -> float:
    """The seconds of a number or of a duration such as 10m; `inf` for less than 0. Raises BadParameter."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(f"'{value}' is {error}.") from error


class _RuntimeChoice(click.Choice):  # type: ignore[type-arg]
    """The runtimes, and the toy, which is accepted but shown in no help text or message."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "toy" else super().convert(value, param, ctx)


def parse_backend(name: str) -> BackendName | None:
    """The runtime that `--backend` names; None for 'auto'."""
    return None if name == "auto" else cast("BackendName", name)


def _complete_draft(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The drafters of the registry, after the last '+'; else files."""
    from edgespec.models.draft_words import complete_draft

    items = [CompletionItem(value) for value, _ in complete_draft(incomplete) if value.startswith(incomplete)]
    return items or [CompletionItem(incomplete, type="file")]


def _parse_bias(value: str | tuple[int, float]) -> tuple[int, float]:
    """A token id and what is added to its logit."""
    token, _, bias = str(value).partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise click.BadParameter(f"'{value}' is not ID=BIAS, such as 42=-5.") from error


def offer(option: Option, *names: str, **changes: Any) -> Callable[[F], F]:
    """A decorator that adds an option of the table to a command. `names` replace its flags and `changes` its
    attributes, both as click takes them.
    """
    flag = f"--{option.name.replace('_', '-')}"
    attributes: dict[str, Any] = {
        "default": option.default,
        "help": option.help,
        "metavar": option.metavar,
        "multiple": option.repeats,
        "show_default": option.default not in (None, False),
        "type": _select_type(option),
    }
    if option.is_rare:
        attributes["cls"] = RareOption
    elif option.name == "draft":
        attributes["shell_complete"] = _complete_draft
    if option.kind is bool:
        flag += f"/--no-{flag.removeprefix('--')}" if option.is_pair else ""
        attributes["is_flag"] = True
    shorts = (f"-{option.short}",) if option.short else ()
    return click.option(*(names or (flag, *shorts)), **attributes | changes)


def _select_type(option: Option) -> Any:
    if option.name == "logit_bias":
        return _parse_bias
    if isinstance(option.kind, tuple):
        return click.Choice(option.kind)
    ranged: Any = {int: click.IntRange, float: FloatRange}.get(option.kind)
    if ranged is None or (option.low is None and option.high is None):
        return None if option.kind is bool else option.kind
    return ranged(option.low, None if option.high == options.LARGEST else option.high)


_VERBOSE = rare_option("--verbose", is_flag=True, help="Show the runtime's own log.")
_RUNTIME = offer(options.BACKEND, type=_RuntimeChoice(cast("tuple[str, ...]", options.BACKEND.kind)))


def add_options(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that applies click's decorators, so that help lists their options in this order."""

    def add(command: F) -> F:
        for option in reversed(decorators):
            command = option(command)
        return command

    return add


# Each adds options to a command, which receives their values as keyword arguments.
load_options = add_options(*map(offer, options.LOADING), _VERBOSE, offer(options.BACKEND))
worker_options = add_options(*map(offer, options.WORKERS))
_run_options = add_options(*map(offer, options.LOADING), _VERBOSE, worker_options, _RUNTIME)
generation_options = add_options(
    *map(offer, (options.DRAFT, *options.GENERATION, *options.SPECULATION, options.MEMORY, options.SLOT_CACHE)),
    _run_options,
)
serving_options = add_options(  # each request brings its own sampling parameters
    *map(offer, (options.DRAFT, *options.SPECULATION, options.MEMORY, options.SLOT_CACHE, options.LEARN)), _run_options
)


def open_hub() -> tuple[Registry, Hub]:
    """The models that have names, and the hub with the files on this machine."""
    from edgespec.models.hub import Hub
    from edgespec.models.registry import load_registry

    return load_registry(), Hub.from_environment()


def load_config(model: str | None, values: dict[str, Any]) -> LoadConfig:
    """What to load, from the parsed options. Commands without --memory keep no texts."""
    from edgespec.api.options import build_load_config

    return build_load_config(model, values)
