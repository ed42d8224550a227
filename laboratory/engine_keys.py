"""The options for drafts that vLLM or SGLang takes, read from the source of its package, which is not imported.

    pip download --no-deps vllm && unzip vllm-*.whl -d FOLDER
    uv run python -m laboratory.engine_keys vllm FOLDER tests/export/keys/vllm.json

The file has the version, the options with their types as the source writes them, and the names of the methods. Tests
compare what `edgespec export` writes with it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import print_result


@click.command()
@click.argument("engine", type=click.Choice(["vllm", "sglang"]))
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
def main(engine: str, folder: Path, output: Path) -> None:
    """Read the package of ENGINE in FOLDER, an unpacked wheel, and write OUTPUT."""
    keys = {"vllm": read_vllm, "sglang": read_sglang}[engine](folder)
    found = {"engine": engine, "version": read_version(folder, engine), **keys}
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print_result("engine_keys", {"version": found["version"], **keys})


def read_vllm(folder: Path) -> dict[str, Any]:
    """The fields of SpeculativeConfig, and the values of its method."""
    module = parse(folder / "vllm" / "config" / "speculative.py")
    aliases = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    options = {name: ast.unparse(kind) for name, kind in list_fields(module, "SpeculativeConfig")}
    return {"options": options, "methods": sorted(list_literals(aliases["SpeculativeMethod"], aliases))}


def read_sglang(folder: Path) -> dict[str, Any]:
    """The options of the namespace `spec` as the command line has them, and the algorithms with their aliases."""
    source = folder / "sglang" / "srt"
    options = {}
    for name, kind in list_fields(parse(source / "arg_groups" / "fields" / "spec.py"), "Spec"):
        if isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Tuple) and "no_cli" not in ast.unparse(kind):
            options["--" + name.replace("_", "-")] = ast.unparse(kind.slice.elts[0])
    algorithms = [
        target.id
        for node in find_class(parse(source / "speculative" / "spec_info.py"), "SpeculativeAlgorithm").body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    aliases = [
        element.value
        for node in ast.walk(parse(source / "speculative" / "spec_registry.py"))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_RESERVED_ALIASES"
        for element in ast.walk(node.value)
        if isinstance(element, ast.Constant) and isinstance(element.value, str)
    ]
    return {"options": options, "methods": sorted({*algorithms, *aliases})}


def parse(path: Path) -> ast.Module:
    """Raises click.ClickException where the package has no such file."""
    if not path.is_file():
        raise click.ClickException(f"There is no {path}: is this an unpacked wheel?")
    return ast.parse(path.read_text(encoding="utf-8"))


def find_class(module: ast.Module, name: str) -> ast.ClassDef:
    """Raises click.ClickException where the module has no such class."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise click.ClickException(f"There is no class {name}: its source has changed.")


def list_fields(module: ast.Module, name: str) -> Iterator[tuple[str, ast.expr]]:
    """(name, type) of the annotated fields of a class."""
    for node in find_class(module, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation


def list_literals(kind: ast.expr, aliases: dict[str, ast.expr]) -> Iterator[str]:
    """The texts of a `Literal`, and of those that it names."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in aliases:
            yield from list_literals(aliases[node.id], aliases)


def read_version(folder: Path, package: str) -> str:
    """Raises click.ClickException where the wheel's metadata is missing."""
    for path in folder.glob(f"{package}-*/METADATA"):
        match = re.search(r"^Version: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1]
    raise click.ClickException(f"{folder} has no METADATA of {package}.")


if __name__ == "__main__":
    main()
