"""Options that a model or its runtime ignores."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import Model
from edgespec.formats.gguf import Header
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan


def find_ignored_options(target: Model, speculation: Speculation, planned: Plan, config: LoadConfig) -> Iterator[str]:
    """A sentence for each option that this target or runtime ignores, or that needs a draft if there is none."""
    reason = "--draft-max is 0" if speculation.drafters else "there is no draft"
    for option in ("draft_max", "draft_tree", "acceptance"):
        value = getattr(config, option)
        if speculation.is_plain and value not in (None, 0, "auto"):
            yield f"--{option.replace('_', '-')} {value} has no effect, since {reason}."
    if target.no_tree_reason is not None and (speculation.is_tree or "lookahead" in speculation.drafters):
        yield f"This model takes chains, not trees, since {target.no_tree_reason}."
    places = ("gpu_layers", "gpu_layers_draft", "n_cpu_moe", "device", "tensor_split", "override_tensor")
    facts = planned.metadata
    for option in ("threads", "batch_threads", *places, "flash_attention"):
        value, name = getattr(planned.options, option), option.replace("_", "-")
        if planned.backend == "mlx" and value is not None:
            yield f"--{name} has no effect on MLX."
        elif option == "gpu_layers_draft" and planned.options.gpu_layers == 0:
            continue  # drafts may be on a GPU all the same
        elif option in places and value and not planned.fit.memory.devices:
            yield f"--{name} has no effect, since llama.cpp uses no GPU."
        elif option == "n_cpu_moe" and value and isinstance(facts, Header) and not facts.own("expert_count"):
            yield f"--{name} has no effect, since the model has no experts."
