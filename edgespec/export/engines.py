"""The engines of an export as a table, and the command that starts one."""

from __future__ import annotations

import json
from collections.abc import Mapping

from edgespec.drafters.registry import LOOKUPS
from edgespec.errors import InvalidRequest
from edgespec.export.engine import ALWAYS, MODELFILE, TENSORRT_FILE, Choice, Engine
from edgespec.export.local_engines import (
    LLAMA_METHODS,
    OLLAMA_METHODS,
    llama_options,
    llama_target,
    mlx_name,
    mlx_options,
    name_for_ollama,
    refuse_for_llama,
    refuse_for_ollama,
    write_modelfile,
)
from edgespec.export.plan import Draft, Exported, ExportPlan
from edgespec.models.references import HubReference

_USUAL_LENGTH = {  # a head that drafts a block has its own
    "model": 4, "eagle3": 3, "eagle": 3, "mtp": 2, "gemma4-assistant": 2, "dflash": 15, "dspark": 7, "medusa": 5,
    "pard": 8, "ngram": 5, "suffix": 24,
}  # fmt: skip


def export(plan: ExportPlan, engine: Engine) -> tuple[Choice, Exported]:
    """The commands and files for `engine`, with the first drafter that it takes.

    Raises InvalidRequest if the original weights are not known, or if it takes none of the drafters that the user
    named.
    """
    if engine.backend is None and plan.target.original is None:
        raise InvalidRequest(
            f"it is not known which weights {plan.name} was made from, and {engine.title} loads those.",
            hint="Name them: --target-id USER/REPO or FOLDER, or `originals` in models.toml.",
        )
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
    length = find_length(chosen, engine) if chosen is not None else None
    return Choice(chosen, length, refusals), _render(plan, engine, chosen, length or 0)


def find_obstacle(plan: ExportPlan, draft: Draft, engine: Engine) -> str | None:
    """Why `engine` cannot use `draft`; None if it can."""
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
    """The vocab_size of the target and of `draft`, None if it is not known; None if `engine` takes any."""
    if draft.weights is None or draft.method not in engine.compares:
        return None
    return plan.target.vocab_size, draft.weights.vocab_size


def find_length(draft: Draft, engine: Engine) -> int | None:
    """Tokens to draft: those of a block, else a usual number; None if `engine` finds the number itself."""
    if engine.has_many and draft.method in LOOKUPS:
        return None
    return draft.block or _USUAL_LENGTH[draft.method]


def _render(plan: ExportPlan, engine: Engine, draft: Draft | None, length: int) -> Exported:
    files = engine.files(plan, draft, length)
    method = draft.method if draft is not None else ALWAYS
    remarks = [
        text.format(length=length, half=max(1, length // 2))
        for text, methods in engine.remarks.items()
        if method in methods or ALWAYS in methods
    ]
    if MODELFILE in files:
        name = name_for_ollama(plan)
        commands: tuple[tuple[str, ...], ...] = (("ollama", "create", name, "-f", MODELFILE), ("ollama", "run", name))
    else:
        target = engine.target(plan, draft)
        options = engine.options(plan, draft, length) if draft is not None else ()
        commands = ((*engine.command, *target, *options),)
    if engine.backend is None and plan.target.is_quantized:
        start = f", or add {engine.quantize} for 8 bits" if engine.quantize else ""
        remarks.append(
            "The weights in use are quantized, the originals are not: serve a repository of them in FP8, AWQ, GPTQ or "
            f"NVFP4 instead{start}."
        )
    files_in_use = plan.target.files
    if engine.backend is not None and isinstance(files_in_use, HubReference) and files_in_use.revision is not None:
        remarks.append(f"{engine.title} takes no revision, and loads what {files_in_use.repo} has today.")
    return Exported(commands, files, tuple(remarks))


def _original(plan: ExportPlan, draft: Draft) -> str | None:
    """What to load for `draft`; None for lookups, and for a head in the target's own files."""
    is_own = draft.method == "mtp" and draft.weights is not None and draft.weights.original == plan.target.original
    return None if draft.weights is None or is_own else draft.weights.require_original()


def _vllm_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    config = {
        "method": _VLLM_METHODS[draft.method],
        "num_speculative_tokens": length,
        "model": _original(plan, draft),
        "parallel_drafting": True if draft.method == "pard" else None,
        "prompt_lookup_min": 2 if draft.method == "ngram" else None,
        "prompt_lookup_max": 5 if draft.method == "ngram" else None,
    }
    return ["--speculative-config", json.dumps({key: value for key, value in config.items() if value is not None})]


def _sglang_options(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    """The options of a chain. The acceptance thresholds, below 1 lossy, keep their default of 1."""
    method, model = _SGLANG_METHODS[draft.method], _original(plan, draft)
    sizes = {
        "DFLASH": {"dflash-block-size": length + 1},
        "DSPARK": {"dspark-block-size": length},
        # One branch: with more the rows of a round are branches, and paged attention refuses them.
        "NGRAM": {"ngram-max-bfs-breadth": 1, "num-draft-tokens": length + 1},
    }.get(method, {"num-steps": length, "eagle-topk": 1, "num-draft-tokens": length + 1})
    options = {"algorithm": method, **({"draft-model-path": model} if model else {}), **sizes}
    return [word for name, value in options.items() for word in (f"--speculative-{name}", str(value))]


def _tensorrt_files(plan: ExportPlan, draft: Draft | None, length: int) -> dict[str, str]:
    if draft is None:
        return {}
    config = {"decoding_type": _TENSORRT_METHODS[draft.method], "max_draft_len": length}
    if model := _original(plan, draft):
        config["speculative_model"] = model
    lines = [f"  {key}: {json.dumps(value)}\n" for key, value in config.items()]
    return {TENSORRT_FILE: "".join(["speculative_config:\n", *lines])}


_VLLM_METHODS = {
    "model": "draft_model", "pard": "draft_model", "eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp",
    "gemma4-assistant": "mtp", "dflash": "dflash", "dspark": "dspark", "ngram": "ngram", "suffix": "suffix",
}  # fmt: skip
_SGLANG_METHODS = {
    "model": "STANDALONE", "eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "gemma4-assistant": "NEXTN",
    "dflash": "DFLASH", "dspark": "DSPARK", "ngram": "NGRAM", "suffix": "NGRAM",
}  # fmt: skip
_TENSORRT_METHODS = {
    "model": "Draft_Target", "pard": "PARD", "eagle3": "Eagle3", "mtp": "MTP", "gemma4-assistant": "MTP",
    "dflash": "DFlash", "dspark": "DSpark", "ngram": "NGram", "suffix": "SA",
}  # fmt: skip
ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(  # vllm/config/speculative.py
        "vLLM 0.33", None, ("vllm", "serve"), _VLLM_METHODS, _vllm_options,
        quantize="--quantization fp8", compares=frozenset({"model", "pard"}),
        measure="`--per-request-spec-decode-metrics summary` adds the accepted tokens to each response",
        remarks={
            "Under load shorter drafts pay: num_speculative_tokens_per_batch_size takes ranges of the batch size, such "
            "as [[1, 4, {length}], [5, 16, {half}]].": set(_VLLM_METHODS) - {"dspark"},
            "The method suffix needs the package arctic-inference.": ("suffix",),
            'If the draft\'s attention is refused, add "attention_backend": "FLASH_ATTN" to the JSON.':
                ("dflash", "dspark"),
        },
    ),
    "sglang": Engine(  # sglang/srt/arg_groups/fields/spec.py
        "SGLang 0.5.23", None, ("sglang", "serve", "--model-path"), _SGLANG_METHODS, _sglang_options,
        quantize="--quantization fp8", compares=frozenset({"model"}),
        measure="its log shows `accept len`, the tokens of a round",
        remarks={
            "`--speculative-adaptive` lets SGLang change the length; `--speculative-eagle-topk 4` with more "
            "`--speculative-num-draft-tokens` drafts trees.": ("eagle", "eagle3", "mtp", "gemma4-assistant"),
        },
    ),
    "tensorrt-llm": Engine(  # tensorrt_llm/llmapi/llm_args.py, November 2026
        "TensorRT-LLM", None, ("trtllm-serve",), _TENSORRT_METHODS, lambda *_: ("--config", TENSORRT_FILE),
        files=_tensorrt_files,
        remarks={
            "Older releases call the option --extra_llm_api_options, the type DraftTarget, and the key "
            "speculative_model_dir.": tuple(_TENSORRT_METHODS),
            "Older releases have num_nextn_predict_layers in place of max_draft_len. The documents name DeepSeek's "
            "models for MTP: check that this target is among those of your release.": ("mtp",),
        },
    ),
    "llama-server": Engine(  # common/arg.cpp of the llama.cpp that edgespec builds
        "llama-server", "llamacpp", ("llama-server",), LLAMA_METHODS, llama_options, llama_target,
        has_many=True, refuse=refuse_for_llama,
        measure="`timings` of a response has draft_n and draft_n_accepted",
    ),
    "mlx-lm": Engine(  # mlx_lm/server.py of version 0.32.2
        "mlx-lm 0.32", "mlx", ("mlx_lm.server", "--model"), {"model": "draft model"}, mlx_options,
        lambda plan, _draft: [mlx_name(plan.target)],
        remarks={
            "`mlx_lm.generate` takes the same options, and --prompt.": (ALWAYS,),
            "With a draft model mlx_lm.server answers one request at a time.": ("model",),
        },
    ),
    "ollama": Engine(  # parser/parser.go of version 0.33.0-rc2
        "Ollama 0.33", "llamacpp", ("serve",), OLLAMA_METHODS, lambda *_: (), files=write_modelfile,
        refuse=refuse_for_ollama,
        remarks={"Older versions of Ollama do not know DRAFT and draft_num_predict.": tuple(OLLAMA_METHODS)},
    ),
}  # fmt: skip
