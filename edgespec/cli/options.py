"""Options that several commands share, and the objects built from them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from edgespec.backends import BackendName
    from edgespec.core.sampling import SamplingParams
    from edgespec.planner.plan import LoadConfig
    from edgespec.registry.schema import SamplingDefaults

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TEMPERATURE = 0.7
_SHOWS_ALL = "help_all"
_DRAFT = "Drafters, joined by '+', or a draft model; `edgespec doctor` lists the drafters."
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p")
_SAMPLED = (*_RECOMMENDED, "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class RareOption(click.Option):
    """An option that `--help` leaves out and `--help-all` shows."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.meta.get(_SHOWS_ALL) else None


rare_option = partial(click.option, cls=RareOption)


class OptionWithSynonym(RareOption):
    """A rare option with a second spelling that is accepted but shown in no help text or message."""

    def __init__(self, *declarations: Any, synonym: str, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.synonym = synonym

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        other = copy(self)
        other.opts = [self.synonym]
        click.Option.add_to_parser(other, parser, ctx)


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


class _Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a duration such as 10m; `inf` for less than 0."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from edgespec.units import parse_duration

        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(f"'{value}' is {error}.", param, ctx)


DURATION = _Duration()


class _BackendChoice(click.Choice):  # type: ignore[type-arg]
    """The runtimes, and names that are accepted but shown in no help text or message."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        super().__init__(["auto", "llamacpp", "mlx"])
        self._hidden = hidden

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self._hidden else super().convert(value, param, ctx)


def backend_option(help_text: str, *hidden: str) -> Callable[[F], F]:
    """`--backend`, which also accepts the names `hidden`."""
    kinds = _BackendChoice(hidden)
    return click.option("--backend", type=kinds, default="auto", show_default=True, help=help_text)


def parse_backend(name: str) -> BackendName | None:
    """The runtime that `--backend` names; None for 'auto'."""
    return None if name == "auto" else cast("BackendName", name)


class DraftOption(click.Option):
    """`--draft`, whose completion lists the drafters of the registry. It is not read before."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names after the last '+' that do not stand before it, else files."""
        from click.shell_completion import CompletionItem

        from edgespec.planner.draft_finder import AUTO, NONE, list_words

        *before, start = incomplete.split("+")
        taken = {part.partition(":")[0] for part in before}
        words = [word + "://" * (spec.needs == "server") for word, spec in list_words() if word not in taken]
        found = words if before else [AUTO, *words, NONE]
        items = [CompletionItem("+".join([*before, word])) for word in found if word.startswith(start)]
        return items or [CompletionItem(incomplete, type="file")]


def draft_option(help_text: str = _DRAFT) -> Callable[[F], F]:
    return click.option(
        "--draft", cls=DraftOption, default="auto", show_default=True, metavar="auto|NAMES|REF", help=help_text
    )


_SAMPLING = (
    click.option("--max-tokens", type=click.IntRange(1),
                 help="Maximum number of tokens of an answer. [default: the model's, else to the end of the context]"),
    click.option("--temperature", type=click.FloatRange(0),
                 help=f"0 is greedy. [default: the model's or {DEFAULT_TEMPERATURE}]"),
    rare_option("--top-k", type=click.IntRange(0), help="Keep the k most probable tokens; 0 keeps all."),
    rare_option("--top-p", type=click.FloatRange(0, 1), help="Keep the fewest tokens that reach this probability."),
    rare_option("--min-p", type=click.FloatRange(0, 1),
                 help="Drop tokens less probable than this fraction of the most probable one."),
    rare_option("--typical-p", type=click.FloatRange(0, 1), help="Locally typical sampling."),
    rare_option("--repetition-penalty", type=click.FloatRange(0.01), help="Above 1 discourages recent tokens."),
    rare_option("--presence-penalty", type=float, help="Subtracted from the logits of recent tokens."),
    rare_option("--frequency-penalty", type=float, help="Subtracted once for each occurrence of a recent token."),
    rare_option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit; repeatable."),
    click.option("--seed", type=int,
                 help="Random seed. Sampled drafts (--acceptance) also need --draft-max for repeatable output."),
    rare_option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
    click.option("--system", metavar="TEXT", help="System message."),
)  # fmt: skip

_SPECULATION = (
    click.option("--draft-max", cls=OptionWithSynonym, synonym="--gamma", type=click.IntRange(0, 63), metavar="N",
                 help="Number of tokens to draft for speculative decoding; 0 disables it. [default: chosen each "
                 "round]"),
    click.option("--draft-tree", cls=OptionWithSynonym, synonym="--nodes", type=click.IntRange(0, 63), metavar="N",
                 help="Number of tokens in a draft tree; more than --draft-max adds branches."),
    click.option("--acceptance", cls=OptionWithSynonym, synonym="--verify", default="auto", show_default=True,
                 type=click.Choice(["auto", "sample", "rejection", "block"]),
                 help="Acceptance rule. The last two sample the draft. All keep the target's distribution."),
)  # fmt: skip

_LOADING = (
    click.option("--ctx", type=click.IntRange(8), help="Context size in tokens. [default: the model's, at most 8192]"),
    click.option("--threads", type=click.IntRange(1, 512),
                 help="CPU threads. [default: the idle physical cores, or fewer where that is faster]"),
    rare_option("--batch-threads", type=click.IntRange(1, 512),
                 help="CPU threads of forwards of several tokens. [default: as --threads]"),
    click.option("--gpu-layers", type=click.IntRange(0), help="Layers to offload to the GPU. [default: all]"),
    rare_option("--kv-type", type=click.Choice(["f16", "q8_0", "q4_0"]), default="f16", show_default=True,
                 help="Data type of the KV cache."),
    rare_option("--flash-attention/--no-flash-attention", default=None,
                 help="Use flash attention. [default: where it is supported and measured to be faster]"),
    rare_option("--mmap/--no-mmap", default=True, show_default=True, help="Map the weights instead of reading them."),
    rare_option("--exact", is_flag=True, help="The same text with any draft and with none, to the last bit; slower."),
    rare_option("--exact-width", type=click.Choice(["1", "2", "4", "8"]), metavar="N",
                 help="Rows of every forward where --exact needs a fixed number. [default: measured]"),
    rare_option("--force", is_flag=True, help="Load even if memory looks insufficient."),
    rare_option("--verbose", is_flag=True, help="Show the runtime's own log."),
)  # fmt: skip

_WORKERS = (
    rare_option("--workers", metavar="HOST:PORT,...",
                 help="Compute a part of the layers on other machines, on which `edgespec worker` runs."),
    rare_option("--trust-network", is_flag=True,
                 help="Allow workers on a network, whose machines can read all texts, and run code on the workers."),
)  # fmt: skip

_MEMORY = click.option(
    "--memory/--no-memory", default=None,
    help="Keep texts on this machine, so that later ones are drafted from them; see `edgespec memory`. [default: keep "
    "them, but of a server's API keys only those that ask for it]",
)  # fmt: skip
LEARN = rare_option(
    "--learn/--no-learn", default=False,
    help="While the model is idle, train its draft on the newest of your texts; see `edgespec adapt`.",
)  # fmt: skip
_RUNTIME = "Runtime that runs the model."
PARALLEL = click.option(
    "--parallel", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N",
    help="Parallel sequences for each model, each with --ctx tokens of KV cache.",
)  # fmt: skip


def generation_options(command: F) -> F:
    """Add the options of a generation to a command, which receives them as keyword arguments."""
    options = (draft_option(), *_SAMPLING, *_SPECULATION, _MEMORY, *_LOADING, *_WORKERS)
    return _add(command, (*options, backend_option(_RUNTIME, "toy")))


def serving_options(command: F) -> F:
    """Add the options of drafting and loading; each request brings its own sampling parameters."""
    options = (draft_option(), *_SPECULATION, _MEMORY, LEARN, *_LOADING, *_WORKERS)
    return _add(command, (*options, backend_option(_RUNTIME, "toy")))


def load_options(command: F) -> F:
    """Add only the options of loading a model."""
    return _add(command, (*_LOADING, backend_option(_RUNTIME)))


def worker_options(command: F) -> F:
    """Add the options that name workers."""
    return _add(command, _WORKERS)


def _add(command: F, decorators: tuple[Callable[[F], F], ...]) -> F:
    for option in reversed(decorators):
        command = option(command)
    return command


def load_config(model: str | None, options: dict[str, Any]) -> LoadConfig:
    """What to load, from the parsed options. Commands without --memory keep no texts. Raises InvalidRequest."""
    from edgespec.backends.options import LoadOptions
    from edgespec.backends.workers import split_addresses
    from edgespec.conversations.database import adapted_folder, memory_folder
    from edgespec.planner.plan import LearnOptions, LoadConfig, MemoryOptions

    return LoadConfig(
        model=model,
        backend=parse_backend(options["backend"]),
        draft=options["draft"],
        draft_max=options.get("draft_max"),
        draft_tree=options.get("draft_tree"),
        acceptance=options.get("acceptance", "auto"),
        load=LoadOptions(
            context_size=options["ctx"],
            threads=options["threads"],
            gpu_layers=options["gpu_layers"],
            kv_type=options["kv_type"],
            flash_attention=options["flash_attention"],
            mmap=options["mmap"],
            caches=options.get("parallel", 1),
            exact=options["exact"],
            exact_width=int(options["exact_width"]) if options["exact_width"] else None,
            batch_threads=options["batch_threads"],
            workers=split_addresses(options.get("workers")),
            trusts_network=options.get("trust_network", False),
        ),
        force=options["force"],
        memory=None if options.get("memory", False) is False else MemoryOptions(memory_folder()),
        adapted=adapted_folder(),
        learn=LearnOptions() if options.get("learn") else None,
    )


def sampling_params(options: dict[str, Any], recommended: SamplingDefaults) -> SamplingParams:
    """The user's options, else the values the model's authors recommend, else the defaults. Raises InvalidRequest."""
    chosen: dict[str, Any] = {name: options[name] for name in _SAMPLED}
    chosen["logit_bias"] = tuple(_parse_bias(text) for text in options["logit_bias"])
    return recommended.resolve(chosen, temperature=DEFAULT_TEMPERATURE)


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"'{text}' is not ID=BIAS, such as 42=-5.", param_hint="--logit-bias") from None
