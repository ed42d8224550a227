"""Plot the value rule of the autopilot: expected tokens and the price of a round's seconds, by draft nodes.

    uv run python -m benchmarks.plots.cost_curve docs/cost_curve.svg [--acceptance 0.9] [--repeats 9]

The seconds are medians over profiles of the embedded pair with one thread. The expected tokens are those of a chain
whose tokens are each accepted at rate --acceptance. stdout ends with one JSON line.
"""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import mul
from pathlib import Path
from statistics import median

import click

from benchmarks.harness import DRAFT, TARGET, load_pair, print_result
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.draft_size import DraftSize, choose_size, list_sizes
from edgespec.autopilot.profile import Profile
from edgespec.backends.options import LoadOptions

MAX_NODES = 15


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.9, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Profiles to measure.")
def main(out: Path, acceptance: float, repeats: int) -> None:
    """Measure the cost of forwards and write the plot to OUT, an SVG file."""
    engine = load_pair("llamacpp", TARGET, DRAFT, LoadOptions(threads=1))
    try:
        profiles = [engine.measure(2.0).rows for _ in range(repeats)]
    finally:
        engine.close()
    costs = CostModel(Profile({rows: median(each[rows] for each in profiles) for rows in profiles[0]}))
    probabilities = list(accumulate(repeat(acceptance, MAX_NODES), mul))
    sizes = list_sizes(probabilities, costs.seconds, 0.0, MAX_NODES)
    best, price = choose_size(sizes, recent_rate=1 / costs.seconds(1))
    draw_plot(sizes, best, price, out)
    rows = [
        {"nodes": size.nodes, "tokens": size.tokens, "seconds": size.seconds, "value": size.value(price)}
        for size in sizes
    ]
    print_result("cost_curve", {"acceptance": acceptance, "price": price, "best": best.nodes, "sizes": rows}, TARGET)


def draw_plot(sizes: list[DraftSize], best: DraftSize, price: float, path: Path) -> None:
    """Two curves in tokens, whose difference is the value of a draft size; a line marks the best one."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    nodes = [size.nodes for size in sizes]
    axes.plot(nodes, [size.tokens for size in sizes], marker="o", label="expected tokens")
    axes.plot(nodes, [price * size.seconds for size in sizes], marker="s", label="price * seconds")
    axes.axvline(best.nodes, color="gray", linestyle=":", label=f"highest value: {best.nodes} nodes")
    axes.set_xticks(nodes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft nodes (rows of the forward less one)")
    axes.set_ylabel("tokens")
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "edgespec"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
