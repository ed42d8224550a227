"""The engines, and the choice of the drafter that one of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgespec.backends import FileBackend
from edgespec.errors import InvalidRequest
from edgespec.export import llama_server, mlx_lm, ollama, sglang, tensorrt_llm, tgi, vllm
from edgespec.export.plan import Draft, Exported, ExportPlan

LOOKUPS = ("ngram", "suffix")
_USUAL_LENGTH = {  # where nothing was measured; a head that drafts a block has its own
    "model": 4, "eagle3": 3, "eagle": 3, "mtp": 2, "gemma4-assistant": 2, "dflash": 15, "dspark": 7, "medusa": 5,
    "pard": 8, "ngram": 5, "suffix": 24,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that serves models.

    title      its name for people, with the version whose source the keys were read in
    backend    whose files it loads; None for the original weights
    methods    its own name of a drafter, by ours
    render     makes the commands from the plan, the drafter that was chosen, and its length, 0 for its own
    has_many   whether it has lookups that work beside a draft, and find their lengths themselves
    measure    where it shows how many drafted tokens are accepted; "" where that is not known
    refuse     why it cannot load the files of a draft; None where it can
    compares   the drafters, by our name, whose vocab_size it compares with the target's when it starts
    """

    title: str
    backend: FileBackend | None
    methods: Mapping[str, str]
    render: Callable[[ExportPlan, Draft | None, int], Exported]
    has_many: bool = False
    measure: str = ""
    refuse: Callable[[Draft], str | None] = lambda draft: None
    compares: frozenset[str] = frozenset()


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine("vLLM 0.33", None, vllm.METHODS, vllm.render, measure=vllm.MEASURE, compares=vllm.COMPARES),
    "sglang": Engine(
        "SGLang 0.5.23", None, sglang.METHODS, sglang.render, measure=sglang.MEASURE, compares=sglang.COMPARES
    ),
    "tensorrt-llm": Engine("TensorRT-LLM", None, tensorrt_llm.METHODS, tensorrt_llm.render),
    "tgi": Engine("text-generation-inference 3.3", None, tgi.METHODS, tgi.render),
    "llama-server": Engine(
        "llama-server", "llamacpp", llama_server.METHODS, llama_server.render, has_many=True,
        measure=llama_server.MEASURE, refuse=llama_server.refuse,
    ),
    "mlx-lm": Engine("mlx-lm 0.32", "mlx", mlx_lm.METHODS, mlx_lm.render),
    "ollama": Engine("Ollama 0.33", "llamacpp", ollama.METHODS, ollama.render, refuse=ollama.refuse),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter that an engine takes.

    draft     None: the engine drafts nothing
    length    tokens that it drafts; None where the engine finds the number itself
    refusals  why others are not taken, by drafter, in the order of preference
    """

    draft: Draft | None
    length: int | None
    refusals: Mapping[str, str]


def export(plan: ExportPlan, engine: Engine) -> tuple[Choice, Exported]:
    """The commands and files for `engine`.

    Raises InvalidRequest where the original weights are not known, or where it takes none of the drafters that the user
    named.
    """
    if engine.backend is None and plan.target.original is None:
        raise InvalidRequest(
            f"it is not known which weights {plan.name} was made from, and {engine.title} loads those.",
            hint="Name them: --target-id USER/REPO or FOLDER, or `originals` in models.toml.",
        )
    choice = choose_draft(plan, engine)
    return choice, engine.render(plan, choice.draft, choice.length or 0)


def choose_draft(plan: ExportPlan, engine: Engine) -> Choice:
    """The first drafter that `engine` takes. Raises InvalidRequest where it takes none of those that the user named."""
    chosen: Draft | None = None
    refusals: dict[str, str] = {}
    for draft in plan.drafts:
        reason = find_obstacle(plan, draft, engine)
        if reason is not None:
            refusals[draft.label] = reason
        elif chosen is None:
            chosen = draft
        elif not (engine.has_many and draft.method in LOOKUPS):
            refusals[draft.label] = f"{engine.title} takes one drafter"
    if chosen is None and refusals and not plan.is_auto:
        label, reason = next(iter(refusals.items()))
        raise InvalidRequest(
            f"the drafter {label} cannot be exported: {reason}.", hint="Name another draft, or use --draft none."
        )
    return Choice(chosen, find_length(chosen, engine) if chosen is not None else None, refusals)


def find_obstacle(plan: ExportPlan, draft: Draft, engine: Engine) -> str | None:
    """Why `engine` cannot use `draft`; None where it can."""
    if draft.method not in engine.methods:
        if draft.method == "self":
            return f"{engine.title} does not draft with parts of the target"
        return f"{engine.title} takes no drafter of the kind {draft.method}"
    if engine.backend is None and draft.weights is not None and draft.weights.original is None:
        return "it is not known which weights it was made from; name them with --draft-id USER/REPO"
    same = draft.weights is not None and draft.weights.original == plan.target.original
    if engine.backend is None and draft.method == "model" and same:
        return "it was made from the target's own weights"
    sizes = compare_vocabularies(plan, draft, engine)
    if sizes is not None and None not in sizes and sizes[0] != sizes[1]:
        return f"its vocab_size is {sizes[1]}, the target's {sizes[0]}, and {engine.title} takes equal ones alone"
    return engine.refuse(draft)


def compare_vocabularies(plan: ExportPlan, draft: Draft, engine: Engine) -> tuple[int | None, int | None] | None:
    """The vocab_size of the target and of `draft`, None where it is not known; None where `engine` takes any."""
    if draft.weights is None or draft.method not in engine.compares:
        return None
    return plan.target.vocab_size, draft.weights.vocab_size


def find_length(draft: Draft, engine: Engine) -> int | None:
    """Tokens to draft: the best by what was measured here, else a usual number, at most those of a block.

    DSpark always drafts its whole block, because vLLM's drafts of fewer tokens are wrong. None where `engine` finds the
    number itself.
    """
    if engine.has_many and draft.method in LOOKUPS:
        return None
    length = draft.measured.length if draft.measured is not None and draft.method != "dspark" else 0
    length = length or draft.block or _USUAL_LENGTH[draft.method]
    return min(length, draft.block or length)
