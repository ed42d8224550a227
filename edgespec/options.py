"""The options of a generation and of a load, each declared once: name, kind, range, default and help.

The command line, the keyword arguments of the Python interface, the tables of `edgespec serve --config`, the registry
and the checks of sampling parameters read this table. A keyword argument and a key of a table have the option's name;
on the command line it is `--name` with hyphens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

TEMPERATURE = 0.7
"""The temperature if neither the user nor the model's authors name one."""

LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    kind        bool, int, float or str; or the texts to choose from
    low, high   the range of a number; None: no limit here
    default     of every interface; None: decided later, as `help` says
    metavar     of the value in the help of the command line
    is_rare     shown by --help-all only
    is_pair     a bool with a second flag, --no-name
    short       a letter for the command line
    repeats     may be given several times on the command line
    """

    name: str
    kind: type | tuple[str, ...]
    help: str
    low: float | None = None
    high: float | None = None
    default: Any = None
    metavar: str | None = None
    is_rare: bool = False
    is_pair: bool = False
    repeats: bool = False
    short: str = ""

    @property
    def limits(self) -> tuple[float, float]:
        """`low` and `high`, infinite if there is none."""
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high


DRAFT = Option(
    name="draft", kind=str, default="auto", metavar="auto|NAMES|REF",
    help="Drafters, joined by '+', or a draft model; `edgespec doctor` lists the drafters.",
)  # fmt: skip
BACKEND = Option(name="backend", kind=("auto", "llamacpp", "mlx"), default="auto", help="Runtime that runs the model.")
PARALLEL = Option(
    name="parallel", kind=int, low=1, high=64, default=4, metavar="N",
    help="Parallel sequences for each model, each with --ctx tokens of KV cache.",
)  # fmt: skip
MEMORY = Option(
    name="memory", kind=bool, is_pair=True,
    help="Keep texts on this machine, so that later ones are drafted from them; see `edgespec memory`. [default: keep "
    "them, but of a server's API keys only those that ask for it]",
)  # fmt: skip
SLOT_CACHE = Option(
    name="slot_cache", kind=bool, is_pair=True, default=True, is_rare=True,
    help="With --memory, keep the KV caches of texts on disk when the model is closed, at most 4 GiB, so that a "
    "conversation that goes on later is not read again.",
)  # fmt: skip
LEARN = Option(
    name="learn", kind=bool, is_pair=True, default=False, is_rare=True,
    help="While the model is idle, train its draft on the newest of your texts; see `edgespec adapt`.",
)  # fmt: skip

SAMPLING = (
    Option(name="temperature", kind=float, low=0, high=100,
           help=f"0 is greedy. [default: the model's or {TEMPERATURE}]"),
    Option(name="top_k", kind=int, low=-1, high=LARGEST, is_rare=True,
           help="Keep the k most probable tokens; 0 and -1 keep all."),
    Option(name="top_p", kind=float, low=0, high=1, is_rare=True,
           help="Keep the fewest tokens that reach this probability."),
    Option(name="min_p", kind=float, low=0, high=1, is_rare=True,
           help="Drop tokens less probable than this fraction of the most probable one."),
    Option(name="typical_p", kind=float, low=0, high=1, is_rare=True, help="Locally typical sampling."),
    Option(name="repetition_penalty", kind=float, low=0.01, high=100, is_rare=True,
           help="Above 1 discourages recent tokens."),
    Option(name="presence_penalty", kind=float, low=-100, high=100, is_rare=True,
           help="Subtracted from the logits of recent tokens."),
    Option(name="frequency_penalty", kind=float, low=-100, high=100, is_rare=True,
           help="Subtracted once for each occurrence of a recent token."),
)  # fmt: skip
"""The numbers of SamplingParams. The model's authors may recommend the first four, and MAX_TOKENS."""

MAX_TOKENS = Option(
    name="max_tokens", kind=int, low=1, high=LARGEST,
    help="Maximum number of tokens of an answer. [default: the model's, else to the end of the context]",
)  # fmt: skip

GENERATION = (
    MAX_TOKENS,
    *SAMPLING,
    Option(name="logit_bias", kind=str, metavar="ID=BIAS", is_rare=True, repeats=True,
           help="Add BIAS to a token's logit; repeatable."),
    Option(name="seed", kind=int,
           help="Random seed. Sampled drafts (--acceptance) also need --draft-max for repeatable output."),
    Option(name="stop", kind=str, metavar="TEXT", is_rare=True, repeats=True,
           help="Stop before this text; repeatable."),
    Option(name="system", kind=str, metavar="TEXT", short="s", help="System message."),
)  # fmt: skip

SPECULATION = (
    Option(name="draft_max", kind=int, low=0, high=63, metavar="N", is_rare=True,
           help="Number of tokens to draft for speculative decoding; 0 disables it. [default: chosen each round]"),
    Option(name="draft_tree", kind=int, low=0, high=63, metavar="N", is_rare=True,
           help="Number of tokens in a draft tree; more than --draft-max adds branches."),
    Option(name="acceptance", kind=("auto", "sample", "rejection", "block"), default="auto", is_rare=True,
           help="Acceptance rule. The last two sample the draft. All keep the target's distribution."),
)  # fmt: skip

LOADING = (
    Option(name="ctx", kind=int, low=8, help="Context size in tokens. [default: the model's, at most 8192]"),
    Option(name="threads", kind=int, low=1, high=512,
           help="CPU threads. [default: the idle physical cores, or fewer where that is faster]"),
    Option(name="batch_threads", kind=int, low=1, high=512, is_rare=True,
           help="CPU threads of forwards of several tokens. [default: as --threads]"),
    Option(name="gpu_layers", kind=int, low=0, help="Layers to offload to the GPU. [default: as many as fit]"),
    Option(name="gpu_layers_draft", kind=int, low=0, is_rare=True,
           help="Layers of a draft model to offload to the GPU. [default: all, or none with --gpu-layers 0]"),
    Option(name="n_cpu_moe", kind=int, low=0, is_rare=True,
           help="Keep the experts of the first N layers in RAM. [default: as many as the GPU has no memory for]"),
    Option(name="device", kind=str, metavar="NAME,...", is_rare=True,
           help="GPUs to use, as `edgespec doctor` names them. [default: all]"),
    Option(name="tensor_split", kind=str, metavar="N,...", is_rare=True,
           help="Shares of the layers by GPU, such as 3,1. [default: by free memory]"),
    Option(name="override_tensor", kind=str, metavar="PATTERN=BUFFER,...", is_rare=True,
           help="Memory of the tensors whose names match a regular expression: CPU, or the name of a GPU."),
    Option(name="kv_type", kind=("f16", "q8_0", "q4_0"), default="f16", is_rare=True,
           help="Data type of the KV cache."),
    Option(name="flash_attention", kind=bool, is_pair=True, is_rare=True,
           help="Use flash attention. [default: where it is supported and measured to be faster]"),
    Option(name="mmap", kind=bool, default=True, is_pair=True, is_rare=True,
           help="Map the weights instead of reading them."),
    Option(name="mlock", kind=bool, default=False, is_rare=True,
           help="Keep the model in RAM. On a Mac this may panic the kernel where memory is short."),
    Option(name="exact", kind=bool, default=False, is_rare=True,
           help="The same text with any draft and with none, to the last bit; slower."),
    Option(name="exact_width", kind=("1", "2", "4", "8"), metavar="N", is_rare=True,
           help="Rows of every forward where --exact needs a fixed number. [default: measured]"),
    Option(name="max_memory", kind=float, low=0.15, high=2**20, metavar="GIB", is_rare=True,
           help="Memory for the process of a model, with its KV caches and drafts. Where it is short, drafts of "
           "'auto' are left out first, then caches. [default: what is free]"),
    Option(name="force", kind=bool, default=False, is_rare=True, help="Load even if memory looks insufficient."),
)  # fmt: skip

WORKERS = (
    Option(name="workers", kind=str, metavar="HOST:PORT,...", is_rare=True,
           help="Compute a part of the layers on other machines, on which `edgespec worker` runs."),
    Option(name="trust_network", kind=bool, default=False, is_rare=True,
           help="Allow workers on a network, whose machines can read all texts, and run code on the workers."),
)  # fmt: skip

LOAD = (DRAFT, *SPECULATION, *LOADING, *WORKERS, BACKEND)
"""The options that a LoadConfig is made from, beside the model, MEMORY, SLOT_CACHE, LEARN and PARALLEL."""

OPTIONS = {each.name: each for each in (*GENERATION, *LOAD, MEMORY, SLOT_CACHE, LEARN, PARALLEL)}
"""All options by their names."""
