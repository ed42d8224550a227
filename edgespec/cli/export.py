"""`edgespec export`: a pair of models for another engine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.options import load_config, model_argument, offer, open_hub, parse_backend
from edgespec.cli.output import open_output, require_new
from edgespec.cli.terminal import TerminalReporter
from edgespec.errors import InvalidRequest
from edgespec.options import BACKEND, DRAFT
from edgespec.progress import reporting

if TYPE_CHECKING:
    from edgespec.backends import BackendName
    from edgespec.export.engine import Engine

_SCRIPT = "serve.sh"
_NAMES = ("vllm", "sglang", "tensorrt-llm", "llama-server", "mlx-lm", "ollama")


@click.command("export")
@model_argument
@click.option("--to", "name", type=click.Choice(_NAMES), required=True, help="The engine that shall serve the model.")
@offer(DRAFT, help="As for run.")
@offer(BACKEND, help="Runtime whose pair of an alias is exported.")
@click.option("--target-id", metavar="USER/REPO", help="Original weights of the model. [default: what is known]")
@click.option("--draft-id", metavar="USER/REPO", help="Original weights of its draft. [default: what is known]")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write serve.sh and what it needs into this folder.",
)
@click.option("--force", is_flag=True, help="Replace files in --output.")  # fmt: skip
def export_command(
    model: str | None, name: str, draft: str, backend: str, target_id: str | None, draft_id: str | None,
    output: Path | None, force: bool,
) -> None:  # fmt: skip
    """Print the command that serves REF with its draft on another engine.

    It is a shell script; its comments say what was measured here, and what stays behind. vllm, sglang and
    tensorrt-llm load the original weights of the model, llama-server and ollama its GGUF files, mlx-lm its MLX folder.
    Nothing is downloaded.
    """
    from edgespec.export.engines import ENGINES, export
    from edgespec.export.gather import gather
    from edgespec.export.remarks import list_remarks
    from edgespec.export.script import format_script

    engine = ENGINES[name]
    request = load_config(
        model, {"backend": _choose_backend(backend, engine) or "auto", "draft": draft, "memory": True}
    )
    with reporting(TerminalReporter()):
        plan = gather(request, *open_hub(), target_id, draft_id)
    choice, exported = export(plan, engine)
    remarks = list(list_remarks(plan, engine, choice, exported))
    script = format_script(exported, remarks, with_files=output is None)
    if output is None:
        click.echo(script, nl=False)
        return
    _write(output, {_SCRIPT: script, **exported.files}, force=force)


def _choose_backend(name: str, engine: Engine) -> BackendName | None:
    """Choose the runtime whose files the engine loads. Raises InvalidRequest if --backend names another one."""
    chosen = parse_backend(name)
    if engine.backend is None or chosen in (None, engine.backend):
        return engine.backend or chosen
    kind = "GGUF files" if engine.backend == "llamacpp" else "MLX folders"
    raise InvalidRequest(f"{engine.title} loads {kind}.", hint=f"Leave --backend {name} out.")


def _write(folder: Path, files: dict[str, str], *, force: bool) -> None:
    """Write all files or none that exists, and make the script executable. Raises InvalidRequest, CacheError."""
    for name in files:
        require_new(folder / name, force=force)
    with suppress(OSError):  # the first file tells what cannot be written
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        with open_output(folder / name, force=force) as out:
            out.write(text)
    (folder / _SCRIPT).chmod(0o700)
    for name in files:
        click.echo(folder / name)
