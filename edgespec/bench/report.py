"""A benchmark's Summary as one HTML page."""

from __future__ import annotations

from pathlib import Path

from edgespec.bench.summary import Summary, format_value, make_printable
from edgespec.errors import CacheError


def write_report(summary: Summary, path: Path) -> None:
    """Write one self-contained HTML file. Raises CacheError if it cannot be written."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from edgespec.bench import plots

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: make_printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = format_value
    page = environment.get_template("report.html.jinja").render(summary=summary, plots=plots)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}.", hint="Choose another folder.") from error
