"""Words that the engines of original weights share."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.export.plan import Container, Draft, ExportPlan, Weights, list_weights

_CACHE = ("huggingface", "/root/.cache/huggingface")


def name_original(weights: Weights) -> str:
    """The repository or folder of the original weights, which is known: `engines.export` has checked."""
    assert weights.original is not None
    return weights.original


def own_or_original(plan: ExportPlan, draft: Draft) -> str | None:
    """What to load for `draft`; None for lookups, and for a head in the target's own files."""
    is_own = draft.method == "mtp" and draft.weights is not None and draft.weights.original == plan.target.original
    return None if draft.weights is None or is_own else name_original(draft.weights)


def hint_quantization(plan: ExportPlan, option: str) -> tuple[str, ...]:
    """How to have weights of about the size of those in use; `option` quantizes to 8 bits when the engine starts."""
    bits = plan.target.bits
    if bits is None or bits > 8:
        return ()
    if bits > 5 and option:
        return (f"The model in use has weights of about {bits} bits, the originals 16; {option} gives 8.",)
    kinds = "FP8" if bits > 5 else "AWQ, GPTQ or NVFP4"
    start = f", or add {option} for 8 bits" if option else ""
    return (
        f"The model in use has weights of about {bits} bits, the originals 16: serve a repository of it in {kinds} "
        f"instead{start}.",
    )


def run_on_gpu(
    plan: ExportPlan,
    draft: Draft | None,
    image: str,
    command: Sequence[str],
    port: int,
    volumes: Sequence[tuple[str, str]] = (),
) -> Container:
    """`command` in a container with all GPUs; local folders are mounted at their own paths."""
    used = [name_original(each) for each in list_weights(plan, draft) if each.is_folder]
    folders = [(path, path) for path in dict.fromkeys(used)]
    everywhere = (*command[1:], "--host", "0.0.0.0", "--port", str(port))
    return Container(image, everywhere, port, (_CACHE, *folders, *volumes), entrypoint=(command[0],))
