"""Options that a loaded model or its runtime ignores."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.backends import Model
from edgespec.engine.drafting import Speculation
from edgespec.planner.plan import Plan


def find_ignored_options(target: Model, speculation: Speculation, planned: Plan) -> Iterator[str]:
    """A sentence for each option that this target or runtime ignores."""
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
        yield f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect on MLX."
