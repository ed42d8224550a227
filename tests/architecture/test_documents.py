"""Documents name files, sections, classes, threads and members that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from edgespec.core.drafter import BlockSession, Drafter, DraftSession
from edgespec.core.protocols import Session
from tests.architecture.test_layers import LAYERS
from tests.gguf_models import REPOSITORY

DOCUMENTS = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
PACKAGE = REPOSITORY / "edgespec"
STARTERS = {"Thread", "ThreadPoolExecutor", "Process"}
PATH = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml|c|svg))`")


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def to_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        if "://" not in link and not (target.exists() and (not anchor or anchor in map(to_anchor, headings))):
            lost.append(link)
    lost += [path for path in PATH.findall(text) if not any((root / path).exists() for root in (REPOSITORY, PACKAGE))]
    assert lost == []


def test_the_table_of_places_names_what_is_there() -> None:
    places = re.findall(r"`(\w+)` (?:in|of) `(edgespec/[\w/]+\.py)`", read("CONTRIBUTING.md"))
    assert places
    assert [place for place in places if not re.search(rf"(?:class|def) {place[0]}\b", read(place[1]))] == []


@cache
def list_names() -> tuple[set[str], set[str]]:
    """The classes of the package, and the names of its threads and processes."""
    classes: set[str] = set()
    threads: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
        }  # such as _NAME of a process
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in STARTERS:
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                named = [constants.get(ast.unparse(value), value) for value in values]
                threads.update(
                    value.value for value in named if isinstance(value, ast.Constant) and isinstance(value.value, str)
                )
    return classes, threads


def read_picture() -> str:
    """The processes, threads and queues of docs/architecture.md."""
    return read("docs/architecture.md").partition("```text\n")[2].partition("```")[0]


def test_the_table_of_layers_is_current() -> None:
    rows = re.findall(r"^\| (\d+) \| (`.*`) \|", read("docs/architecture.md"), re.MULTILINE)
    shown = {int(number): set(re.findall(r"`(\w+)`", names)) for number, names in rows}
    assert shown == {number: set(layer) for number, layer in enumerate(LAYERS, 1)}


def test_the_picture_has_all_threads() -> None:
    _, threads = list_names()
    assert set(re.findall(r"(?:thread|process) (edgespec-[a-z-]+)", read_picture())) == threads


def test_the_picture_names_classes_and_files_that_exist() -> None:
    classes, _ = list_names()
    named = set(re.findall(r"\b_?[A-Z]\w+", read_picture())) - {"Queue", "SimpleQueue"}
    assert len(named) > 20 and named - classes == set()
    paths = re.findall(r"(?:\w+/)+\w+\.py", read_picture())
    assert paths and [path for path in paths if not (PACKAGE / path).exists()] == []


@pytest.mark.parametrize(
    ("document", "contract"),
    [("backend", Session), ("drafter", Drafter), ("drafter", DraftSession), ("drafter", BlockSession)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_every_member_of_a_contract_is_explained(document: str, contract: type) -> None:
    explained = set(re.findall(r"`([a-z_]+)", read(f"docs/write-a-{document}.md")))
    members = {name for name in {*vars(contract), *contract.__annotations__} if not name.startswith("_")}
    assert members - explained == set()
