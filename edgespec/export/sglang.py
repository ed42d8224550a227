"""SGLang: `sglang serve`. Options: sglang/srt/arg_groups/fields/spec.py of version 0.5.23."""

from __future__ import annotations

from edgespec.export.plan import Draft, Exported, ExportPlan
from edgespec.export.weights import hint_quantization, name_original, own_or_original, run_on_gpu

METHODS = {
    "model": "STANDALONE", "eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "gemma4-assistant": "NEXTN",
    "dflash": "DFLASH", "dspark": "DSPARK", "ngram": "NGRAM", "suffix": "NGRAM",
}  # fmt: skip
COMPARES = frozenset({"model"})
MEASURE = "its log shows `accept len`, the tokens of a round"
_IMAGE, _PORT = "lmsysorg/sglang:v0.5.23", 30000


def render(plan: ExportPlan, draft: Draft | None, length: int) -> Exported:
    """`sglang serve`, which downloads the original weights when it starts."""
    words = ["sglang", "serve", "--model-path", name_original(plan.target)]
    if draft is not None:
        words += _describe(plan, draft, length)
    return Exported((tuple(words),), run_on_gpu(plan, draft, _IMAGE, words, _PORT), remarks=_list_remarks(plan, draft))


def _describe(plan: ExportPlan, draft: Draft, length: int) -> list[str]:
    """The options of a chain. The acceptance thresholds, below 1 lossy, keep their default of 1."""
    method = METHODS[draft.method]
    words = ["--speculative-algorithm", method]
    if model := own_or_original(plan, draft):
        words += ["--speculative-draft-model-path", model]
    if method == "DFLASH":
        return [*words, "--speculative-dflash-block-size", str(length + 1)]
    if method == "DSPARK":
        return [*words, "--speculative-dspark-block-size", str(length)]
    if method == "NGRAM":
        # One branch: with more the rows of a round are branches, and paged attention refuses them.
        return [*words, "--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", str(length + 1)]
    chain = ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
    return [*words, *chain, "--speculative-num-draft-tokens", str(length + 1)]


def _list_remarks(plan: ExportPlan, draft: Draft | None) -> tuple[str, ...]:
    remarks = []
    if draft is not None and METHODS[draft.method] in ("EAGLE", "EAGLE3", "NEXTN"):
        remarks.append(
            "`--speculative-adaptive` lets SGLang change the length; `--speculative-eagle-topk 4` with more "
            "`--speculative-num-draft-tokens` drafts trees."
        )
    return (*remarks, *hint_quantization(plan, "--quantization fp8"))
