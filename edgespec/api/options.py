"""Keyword arguments of the Python interface, named as the options of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

from edgespec import options as table
from edgespec.autopilot.speculation import Rule
from edgespec.backends.options import KvType, LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.errors import InvalidRequest
from edgespec.folders import adapted_folder, memory_folder
from edgespec.machines.memory import split_names
from edgespec.machines.workers import split_addresses
from edgespec.models.load_config import LearnOptions, LoadConfig, MemoryOptions
from edgespec.models.registry import SamplingDefaults


class LoadArguments(TypedDict, total=False):
    """Arguments of `load`. One that is left out has the command line's default.

    backend          'auto' (the default), 'llamacpp', 'mlx', or 'toy', the deterministic runtime of the tests
    draft            'auto' (the default), 'none', drafters joined by '+' such as 'ngram+model', or a model reference;
                     drafters are 'ngram', 'model', 'pard', self-drafts ('layerskip:4'), and those of packages
    draft_max        drafted tokens on a path, at most; 0 decodes plainly, None lets the autopilot decide each round
    draft_tree       drafted tokens in all; more than draft_max make a tree
    acceptance       'auto' (the default), 'sample', 'rejection' or 'block'; all keep the target's distribution
    ctx              context size in tokens; None: the model's own, at most 8,192
    threads          CPU threads; None: the idle physical cores, or fewer if that was measured to be faster
    batch_threads    CPU threads of forwards of several tokens; None: as threads
    gpu_layers       layers on the GPU; None: as many as fit
    gpu_layers_draft layers of a draft model on the GPU; None: all, or none if `gpu_layers` is 0
    n_cpu_moe        layers whose experts stay in RAM, from the first on; None: as many as the GPU has no memory for
    device           names of the GPUs to use, as `edgespec doctor` shows them; None: all
    tensor_split     shares of the layers of each of these, such as '3,1'; None: by their free memory
    override_tensor  'PATTERN=BUFFER,...': CPU or a GPU, for the memory of tensors whose names match
    kv_type          element type of the KV cache: 'f16' (the default), 'q8_0' or 'q4_0'
    flash_attention  None: on if the device supports it, unless it was measured to be slower
    mmap             map the weights instead of reading them; True by default
    mlock            keep the model in RAM even if the system would swap it out; False by default
    exact            the same text with any draft and with none, to the last bit; slower
    exact_width      rows of every forward if `exact` needs a fixed number: 1, 2, 4 or 8; None: measured
    max_memory       GiB for the process of the model, with KV caches and drafts; None: what is free
    force            load even if the memory looks too small
    parallel         generations at once, each with a KV cache of `ctx` tokens; 1 by default
    isolated         run the model in a process of its own, whose death is a BackendError; False by default
    workers          HOST:PORT of machines on which `edgespec worker` runs, for a part of the layers. The model is
                     isolated then
    trust_network    allow workers on a network, not only on this machine or behind a tunnel
    memory           keep texts in the data folder, where the command line keeps them too, and draft from them; False by
                     default
    slot_cache       with `memory`, keep the KV caches of texts on disk when the model is closed; True by default
    """

    backend: Literal["auto", "llamacpp", "mlx", "toy"]
    draft: str
    draft_max: int | None
    draft_tree: int | None
    acceptance: Rule
    ctx: int | None
    threads: int | None
    batch_threads: int | None
    gpu_layers: int | None
    gpu_layers_draft: int | None
    n_cpu_moe: int | None
    device: str | Sequence[str] | None
    tensor_split: str | None
    override_tensor: str | None
    kv_type: KvType
    flash_attention: bool | None
    mmap: bool
    mlock: bool
    exact: bool
    exact_width: int | None
    max_memory: float | None
    force: bool
    parallel: int
    isolated: bool
    workers: Sequence[str]
    trust_network: bool
    memory: bool
    slot_cache: bool


class GenerationArguments(TypedDict, total=False):
    """Arguments of `generate`, `stream` and `chat`. None, or one that is left out, takes the default.

    max_tokens          by default what the model's authors recommend, else to the end of the context
    temperature         0 is greedy; by default what the model's authors recommend, else 0.7
    top_k, min_p        0 keeps all tokens
    top_p, typical_p    1 keeps all tokens
    repetition_penalty, presence_penalty, frequency_penalty   of tokens among the last 64
    logit_bias          token id -> bias
    seed                makes sampling repeatable; drafts that are drawn at random need draft_max as well
    stop                one text, or several, that end the answer
    system              system message; needs messages
    schema              JSON schema that the answer follows; {} for any JSON
    tools               functions in OpenAI's form: {"type": "function", "function": {"name": ..., "parameters": ...}}
    tool_choice         'auto', 'none', 'required', or the name of the tool to call
    parallel_tool_calls whether an answer may hold several calls; None: as many as the model likes
    template_variables  JSON values that the chat template may read, such as enable_thinking
    memory_source       what the memory keeps the text with, such as the name of a conversation;
                        `edgespec memory forget` removes all texts of a source
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    system: str | None
    schema: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool | None
    template_variables: Mapping[str, Any] | None
    memory_source: str | None


def build_load_config(model: str | None, arguments: Mapping[str, Any]) -> LoadConfig:
    """What to load, by the values of options; the table's defaults take the place of those that are missing.

    `memory` is None or True to keep texts; the default keeps none. Raises InvalidRequest for a value that cannot work.
    """
    own = {"parallel": 1, "memory": False, "slot_cache": True}
    values = {option.name: option.default for option in table.LOAD} | own | dict(arguments)
    for option in table.LOAD:
        if isinstance(option.kind, tuple) and (value := values[option.name]) is not None:
            choices = (*option.kind, "toy") if option is table.BACKEND else option.kind
            if str(value) not in choices:
                raise InvalidRequest(f"{option.name} cannot be '{value}'.", hint=f"Use one of {', '.join(choices)}.")
    if not isinstance(values["draft"], str):
        raise InvalidRequest(f"draft cannot be {values['draft']!r}.", hint="Name drafters or a model, such as 'ngram'.")
    workers, width, budget = values["workers"], values["exact_width"], values["max_memory"]
    low, high = table.OPTIONS["max_memory"].limits
    if budget is not None and not (isinstance(budget, int | float) and low <= budget <= high):
        raise InvalidRequest(f"max_memory cannot be '{budget}'.", hint=f"Use {low:g} GiB or more.")
    loaded = values | {
        "context_size": values["ctx"],
        "device": None if values["device"] is None else split_names(values["device"]),
        "caches": values["parallel"],
        "exact_width": None if width is None else int(width),
        "workers": split_addresses(workers if workers is None or isinstance(workers, str) else ",".join(workers)),
        "trusts_network": values["trust_network"],
    }
    return LoadConfig(
        model=model,
        backend=None if values["backend"] == "auto" else values["backend"],
        **{name: values[name] for name in ("draft", "draft_max", "draft_tree", "acceptance", "force")},
        load=LoadOptions(**{each.name: loaded[each.name] for each in fields(LoadOptions) if each.name in loaded}),
        max_bytes=None if budget is None else round(budget * 2**30),
        memory=None if values["memory"] is False else MemoryOptions(memory_folder(), keeps_caches=values["slot_cache"]),
        adapted=adapted_folder(),
        learn=LearnOptions() if values.get("learn") else None,
    )


def resolve_sampling(arguments: Mapping[str, Any], recommended: SamplingDefaults) -> SamplingParams:
    """The arguments, else what the model's authors recommend, else the defaults. Raises InvalidRequest."""
    chosen: dict[str, Any] = {option.name: arguments.get(option.name) for option in table.SAMPLING}
    bias = arguments.get("logit_bias") or ()
    chosen["logit_bias"] = tuple(bias.items() if isinstance(bias, Mapping) else bias)
    return recommended.resolve(chosen, temperature=table.TEMPERATURE)


def require_known(function: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for an argument that does not exist, as Python does for those of a plain function."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is '{near[0]}'" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")
