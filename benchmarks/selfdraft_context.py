"""Cost of a drafted token as the context grows: the target's own step, and drafts that read all of it or a part.

    uv run python -m benchmarks.selfdraft_context --target T.gguf --method sparse:4,256 --method qspec:4

Medians of single-row forwards, interleaved, at each context length. The text is a repeated sentence. stdout ends with
one JSON line.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

import click

from benchmarks.harness import MODEL_PATH, TARGET, load_model, print_result
from benchmarks.selfdrafts import COPIES, open_self_draft
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Session

STEPS = 3  # forwards a draft makes in each turn


@click.command()
@click.option("--target", type=MODEL_PATH, default=TARGET)
@click.option("--method", "methods", multiple=True, default=("sparse:4,256",), show_default=True)
@click.option("--context", "contexts", multiple=True, type=int, default=(256, 512, 1024, 2048, 4096, 8000))
@click.option("--backend", type=click.Choice(["llamacpp", "mlx"]), default="llamacpp", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--copies", type=click.Path(path_type=Path), default=COPIES, show_default=True)
def main(
    target: Path, methods: tuple[str, ...], contexts: tuple[int, ...], backend: BackendName, repeats: int, copies: Path
) -> None:
    """Time the target and each METHOD at each context length."""
    options = LoadOptions(context_size=max(contexts) + 64, threads=1 if backend == "llamacpp" else None)
    model = load_model(backend, target, options)
    session = model.open_session()
    drafts = {name: open_self_draft(model, name, copies / target.stem).open_session(session) for name in methods}
    text = [100 + i % 50 for i in range(max(contexts))]
    rows = []
    for context in contexts:
        read_prompt(session, text[:context])
        times: dict[str, list[float]] = {name: [] for name in ("target", *drafts)}
        for _ in range(repeats):
            times["target"] += time_steps(session)
            for name, draft in drafts.items():
                times[name] += time_steps(draft)
                draft.rewind(context)
            session.rewind(context)
        medians = {name: median(seconds) for name, seconds in times.items()}
        click.echo(f"{context:6}  " + "  ".join(f"{name} {s * 1e3:.2f} ms" for name, s in medians.items()), err=True)
        rows.append({"context": context, **medians})
    print_result("selfdraft_context", {"seconds": rows}, target)


def time_steps(session: Session) -> list[float]:
    """[STEPS] seconds of single rows, after one that is not counted: in it a draft takes over the target's text."""
    times = []
    for i in range(1 + STEPS):
        start_s = perf_counter()
        session.forward(100 + i, NO_DRAFT).argmax()
        session.commit(())
        times.append(perf_counter() - start_s)
    return times[1:]


if __name__ == "__main__":
    main()
