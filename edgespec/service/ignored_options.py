"""Options that a loaded model, its runtime or a load without drafts ignores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.backends import Model
from edgespec.engine.drafting import Speculation
from edgespec.planner.plan import LoadConfig, Plan


def find_ignored_options(target: Model, speculation: Speculation, planned: Plan, config: LoadConfig) -> Iterator[str]:
    """A sentence for the options that this target or runtime ignores, or that need a draft where there is none."""
    if speculation.is_plain and (names := list(_name_draft_options(config))):
        reason = "--draft-max is 0" if speculation.drafters else "there is no draft"
        yield f"{' and '.join(names)} {_have(names)} no effect, since {reason}."
    if target.no_tree_reason is not None and speculation.is_tree:
        yield f"This model takes chains, not trees, since {target.no_tree_reason}."
    options = planned.options
    values = {
        "--threads": options.threads,
        "--batch-threads": options.batch_threads,
        "--gpu-layers": options.gpu_layers,
        "--flash-attention": options.flash_attention,
    }
    if planned.backend == "mlx" and (names := [name for name, value in values.items() if value is not None]):
        yield f"{' and '.join(names)} {_have(names)} no effect on MLX."


def _name_draft_options(config: LoadConfig) -> Iterator[str]:
    """The options that were given and say how to draft."""
    if config.draft_max:
        yield f"--draft-max {config.draft_max}"
    if config.draft_tree:
        yield f"--draft-tree {config.draft_tree}"
    if config.acceptance != "auto":
        yield f"--acceptance {config.acceptance}"


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
