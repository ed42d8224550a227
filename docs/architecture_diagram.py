"""Draw docs/architecture.svg from the imports of the package: `uv run python docs/architecture_diagram.py`.

A row is a layer of tests/architecture/test_layers.py, the highest at the top. An arrow is an import; one that a chain
of other arrows implies is left out.
"""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "edgespec"
LAYERS_FILE = REPOSITORY / "tests" / "architecture" / "test_layers.py"
OUTPUT = REPOSITORY / "docs" / "architecture.svg"

WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, MARGIN = 900, 84, 132, 36, 24
STYLE = """
  text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #1f2933; text-anchor: middle }
  rect { fill: #eef2f7; stroke: #7b8794; rx: 6 }
  path { fill: none; stroke: #52606d; stroke-opacity: .55; stroke-width: 1.3; marker-end: url(#head) }
  marker path { fill: #52606d; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } rect { fill: #1f2933; stroke: #9aa5b1 }
    path { stroke: #9aa5b1 } marker path { fill: #9aa5b1 }
  }
"""

Graph = dict[str, set[str]]
"""Part of the package -> the parts that it imports."""


def read_layers() -> list[list[str]]:
    """The layers that the tests enforce, lowest first."""
    for node in ast.parse(LAYERS_FILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [list(layer) for layer in ast.literal_eval(node.value)]
    raise ValueError(f"{LAYERS_FILE} has no LAYERS")


def read_imports() -> Graph:
    """Every import between two parts, at whatever depth of a file."""
    graph: Graph = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        found = graph.setdefault(part, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name for alias in node.names if (name := find_part(alias.name))}
            elif isinstance(node, ast.ImportFrom) and (name := find_part(node.module or "")):
                found.add(name)
        found.discard(part)
    return graph


def find_part(module: str) -> str | None:
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == PACKAGE.name and rest else None


def reduce(graph: Graph) -> Graph:
    """The graph without arrows that a path of two or more others implies (transitive reduction)."""

    def reach(part: str) -> set[str]:
        return set().union(*({child} | reach(child) for child in graph[part])) if graph[part] else set()

    reachable = {part: reach(part) for part in graph}
    return {
        part: {child for child in children if not any(child in reachable[other] for other in children - {child})}
        for part, children in graph.items()
    }


def place(layers: list[list[str]], graph: Graph) -> dict[str, tuple[float, float]]:
    """Part -> (x, y) of its box's middle. Within a row, parts stand below the mean of those that import them."""
    places: dict[str, tuple[float, float]] = {}
    for row, layer in enumerate(reversed(layers)):

        def mean_x(part: str) -> float:
            above = [x for other, (x, _) in places.items() if part in graph[other]]
            return sum(above) / len(above) if above else WIDTH / 2

        ordered = sorted(layer, key=lambda part: (mean_x(part), part))
        for column, part in enumerate(ordered):
            shift = (row % 3 - 1) * 34 if len(layer) == 1 else 0  # so that arrows past a lone box are seen
            x = WIDTH * (column + 1) / (len(layer) + 1) + shift
            places[part] = (x, MARGIN + ROW * row + BOX_HEIGHT / 2)
    return places


def draw(layers: list[list[str]], graph: Graph) -> str:
    """The SVG document."""
    shown = reduce(graph)
    places = place(layers, shown)
    height = 2 * MARGIN + ROW * (len(layers) - 1) + BOX_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Packages of edgespec by layer, with their imports">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for part in sorted(shown):
        parts += [draw_arrow(places[part], places[child]) for child in sorted(shown[part])]
    for part, (x, y) in sorted(places.items()):
        left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{part}</text>')
    return "\n".join((*parts, "</svg>", ""))


def draw_arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1, y2 = y1 + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2
    bend = min(60.0, (y2 - y1) / 2)
    return f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"/>'


if __name__ == "__main__":
    OUTPUT.write_text(draw(read_layers(), read_imports()), encoding="utf-8")
