"""The options that `run` and `chat` share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from edgespec.backends import BackendName
    from edgespec.core.sampling import SamplingParams
    from edgespec.planner.plan import LoadConfig
    from edgespec.registry.schema import SamplingDefaults

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TEMPERATURE = 0.7


def backend_option(told: str, *more: str) -> Callable[[F], F]:
    """`--backend`, with `more` names than the runtimes for real models."""
    return click.option(
        "--backend", type=click.Choice(["auto", "llamacpp", "mlx", *more]), default="auto", show_default=True, help=told
    )


def backend_named(name: str) -> BackendName | None:
    """The runtime that the option names; None for the best one."""
    return None if name == "auto" else cast("BackendName", name)


_DRAFT = (
    click.option("--draft", default="auto", show_default=True, metavar="auto|model|ngram|none|REF|SELF",
                 help="The registry's draft model, lookups in the text, nothing, a model of your choice, or the model "
                 "itself: layerskip[:K], qspec[:BITS], planes, sparse[:SINK,WINDOW], joined by '+'."),
)  # fmt: skip

_SAMPLING = (
    click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Longest answer."),
    click.option("--temperature", type=click.FloatRange(0),
                 help=f"0 is greedy. [default: the model's or {DEFAULT_TEMPERATURE}]"),
    click.option("--top-k", type=click.IntRange(0), help="Keep the k most probable tokens; 0 keeps all."),
    click.option("--top-p", type=click.FloatRange(0, 1), help="Keep the fewest tokens with this much probability."),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Drop tokens this much less probable than the best."),
    click.option("--typical-p", type=click.FloatRange(0, 1), help="Locally typical sampling."),
    click.option("--repetition-penalty", type=click.FloatRange(0.01), help="Above 1 discourages tokens seen lately."),
    click.option("--presence-penalty", type=float, help="Subtracted from the logits of tokens seen lately."),
    click.option("--frequency-penalty", type=float, help="The same, once for every occurrence."),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to a token's logit; repeatable."),
    click.option("--seed", type=int, help="Makes sampling repeatable; drawn drafts (--verify) need --gamma for that."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; repeatable."),
    click.option("--system", metavar="TEXT", help="System message."),
)  # fmt: skip

_AMOUNT = (
    click.option("--gamma", type=click.IntRange(0, 63),
                 help="Drafted tokens at most; 0 decodes plainly. [default: decided each round]"),
    click.option("--nodes", type=click.IntRange(0, 63), help="Drafted tokens in all; more than gamma make a tree."),
    click.option("--verify", type=click.Choice(["auto", "sample", "rejection", "block"]), default="auto",
                 show_default=True,
                 help="Acceptance rule; the last two draw drafts at random. All keep the target's distribution."),
)  # fmt: skip

_LOADING = (
    click.option("--ctx", type=click.IntRange(8), help="Context size in tokens. [default: the model's, at most 8192]"),
    click.option("--threads", type=click.IntRange(1, 512), help="CPU threads. [default: the idle physical cores]"),
    click.option("--gpu-layers", type=click.IntRange(0), help="Layers on the GPU. [default: all]"),
    click.option("--kv-type", type=click.Choice(["f16", "q8_0", "q4_0"]), default="f16", show_default=True,
                 help="Element type of the KV cache."),
    click.option("--flash-attention/--no-flash-attention", default=None, help="[default: where supported]"),
    click.option("--mmap/--no-mmap", default=True, show_default=True, help="Map the weights instead of reading them."),
    click.option("--exact", is_flag=True, help="One numeric result for any number of rows; slower."),
    click.option("--force", is_flag=True, help="Load even if the memory looks too small."),
    click.option("--verbose", is_flag=True, help="Show the runtime's own log."),
)  # fmt: skip


PARALLEL = click.option(
    "--parallel", type=click.IntRange(1, 64), default=4, show_default=True, metavar="N",
    help="Answers of each model at once, each in a cache of --ctx tokens that keeps its text.",
)  # fmt: skip


def generation_options(command: F) -> F:
    """Add the options of a generation to a command, which receives them all as keyword arguments."""
    for option in reversed((*_DRAFT, *_SAMPLING, *_AMOUNT, *_LOADING, backend_option("Runtime.", "toy"))):
        command = option(command)
    return command


def serving_options(command: F) -> F:
    """Add the options of drafting and loading, for models whose generations are settled elsewhere."""
    for option in reversed((*_DRAFT, *_AMOUNT, *_LOADING, backend_option("Runtime.", "toy"))):
        command = option(command)
    return command


def load_options(command: F) -> F:
    """Add the options of loading a model alone."""
    for option in reversed((*_LOADING, backend_option("Runtime."))):
        command = option(command)
    return command


def open_request(model: str | None, given: dict[str, Any]) -> LoadConfig:
    """What to open, from the options. Raises InvalidRequest."""
    from edgespec.backends.options import LoadOptions
    from edgespec.planner.plan import LoadConfig

    return LoadConfig(
        model=model,
        backend=backend_named(given["backend"]),
        draft=given["draft"],
        gamma=given.get("gamma"),
        nodes=given.get("nodes"),
        rule=given.get("verify", "auto"),
        load=LoadOptions(
            context_size=given["ctx"],
            threads=given["threads"],
            gpu_layers=given["gpu_layers"],
            kv_type=given["kv_type"],
            flash_attention=given["flash_attention"],
            mmap=given["mmap"],
            caches=given.get("parallel", 1),
            exact=given["exact"],
        ),
        force=given["force"],
    )


def sampling_params(given: dict[str, Any], recommended: SamplingDefaults) -> SamplingParams:
    """What the user said, else what the model's authors recommend, else the defaults. Raises InvalidRequest."""
    from edgespec.core.sampling import SamplingParams

    values: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if (value := getattr(recommended, name)) is not None:
            values[name] = value
    for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty"):  # fmt: skip
        if given[name] is not None:
            values[name] = given[name]
    return SamplingParams(**values, logit_bias=tuple(_bias(text) for text in given["logit_bias"]))


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"'{text}' is not ID=BIAS, such as 42=-5.", param_hint="--logit-bias") from None
