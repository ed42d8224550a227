"""What a drafted token costs as the context grows: the target's own step, and drafts that see all or a part of it.

    uv run python -m benchmarks.selfdraft_context --target T.gguf --method sparse:4,256 --method qspec:4

The text is a repeated sentence; medians of interleaved single-row forwards at each context.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import cast

import click

from benchmarks.machine import describe
from edgespec.backends import BackendName, open_model
from edgespec.backends.attached_draft import parse
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import NO_DRAFT, Session

_STEPS = 3  # drafted tokens of each turn


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--method", "methods", multiple=True, default=("sparse:4,256",), show_default=True)
@click.option("--context", "contexts", multiple=True, type=int, default=(256, 512, 1024, 2048, 4096, 8000))
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp")
@click.option("--repeats", type=int, default=7, show_default=True)
@click.option("--copies", type=click.Path(path_type=Path), default=Path("/tmp/edgespec-copies"), show_default=True)
def main(
    target: Path, methods: tuple[str, ...], contexts: tuple[int, ...], backend: str, repeats: int, copies: Path
) -> None:
    options = LoadOptions(context_size=max(contexts) + 64, threads=1 if backend == "llamacpp" else None)
    model = open_model(cast("BackendName", backend), target, options, progress=lambda f: None, check=lambda: None)
    session = model.open_session(lambda: None)
    drafts: dict[str, Session] = {}
    for name in methods:
        method = parse(name)
        if method is None:
            raise click.BadParameter(f"{name} is no self-draft", param_hint="--method")
        made = model.self_draft(method, folder=copies / target.stem, progress=lambda f: None, check=lambda: None)
        drafts[name] = made.open_session(session, lambda: None)
    text = [100 + i % 50 for i in range(max(contexts))]
    rows = []
    for context in contexts:
        for _ in session.prefill(text[:context]):
            pass
        times: dict[str, list[float]] = {name: [] for name in ("target", *drafts)}
        for _ in range(repeats):
            times["target"] += _steps(session)
            for name, draft in drafts.items():
                times[name] += _steps(draft)
                draft.rewind(context)
            session.rewind(context)
        rows.append({"context": context, **{name: median(found) for name, found in times.items()}})
        told = (f"{name} {seconds * 1e3:.2f} ms" for name, seconds in rows[-1].items() if name != "context")
        click.echo(f"{context:6}  " + "  ".join(told))
    click.echo(json.dumps({"benchmark": "selfdraft_context", "seconds": rows, **describe(target)}))


def _steps(session: Session) -> list[float]:
    """Seconds of single rows, after one that is not counted: a draft takes over the target's text in it."""
    found = []
    for i in range(1 + _STEPS):
        started = perf_counter()
        session.forward(100 + i, NO_DRAFT).argmax()
        session.commit(())
        found.append(perf_counter() - started)
    return found[1:]


if __name__ == "__main__":
    main()
