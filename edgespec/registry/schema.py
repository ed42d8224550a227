"""models.toml: aliases with target and draft. The user's file is merged over the shipped one; both are validated."""

from __future__ import annotations

import difflib
import importlib.resources
import importlib.util
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from edgespec.errors import RegistryError, UnknownModel, reading
from edgespec.formats.heads import HeadKind
from edgespec.hub.cache import Alias, HubRepo, PackagedFile, Reference, parse_reference
from edgespec.options import MAX_TOKENS, SAMPLING

if TYPE_CHECKING:
    from edgespec.backends import FileBackend
    from edgespec.core.sampling import SamplingParams
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder


ROLES = ("target", "draft", "pard", "head")  # of the models of a pair
EMBEDDED_ALIAS = "python-6m"
NO_DRAFT = "ngram"
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

Acceptance = tuple[float, float]
"""Acceptance rates (alpha, from 0 to 1) of a draft model: on less predictable texts, and on more predictable ones."""
Task = Literal["chat", "code", "reasoning"]
TASKS: tuple[Task, ...] = get_args(Task)
Table = dict[str, Any]

_FILE_NAME = "models.toml"
_REFERENCES = ("target", "package", "draft", "pard", "head", "with_head")
_ABOUT = ("parameters", "active", "license", "tasks")


@dataclass(frozen=True, slots=True)
class Originals:
    """`user/repo` of the weights as their authors released them; None where none is stated.

    head  that of the target where the head lies in the target's own files
    """

    target: str | None = None
    draft: str | None = None
    pard: str | None = None
    head: str | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What helps to choose a model. None or empty where nothing is stated.

    parameters  of the target, in billions
    active      those of them that one token uses, in a mixture of experts
    license     of the weights, as people call it
    tasks       what the model is known for
    """

    parameters: float | None = None
    active: float | None = None
    license: str | None = None
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters recommended by a model's authors; None where they give none.

    max_tokens  of an answer, for a model that does not end its answers itself
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None

    def resolve(self, chosen: Mapping[str, Any], **fallback: Any) -> SamplingParams:
        """The parameters in order of precedence: `chosen`, this recommendation, `fallback`, SamplingParams' defaults.

        None leaves a parameter to the next in order. Raises InvalidRequest.
        """
        from edgespec.core.sampling import SamplingParams

        values = dict(fallback)
        for source in (asdict(self), chosen):
            values |= {name: value for name, value in source.items() if value is not None and name != "max_tokens"}
        return SamplingParams(**values)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft models.

    target      a file of a Python package where `package` names one that is installed
    draft       None: n-gram drafting
    pard        a PARD model, which drafts several tokens in one forward
    pard_token  its mask token; None where its own files name it
    head        a trained head of the target, in files of its own
    head_kind   its kind
    head_verified  whether it was run with this target
    with_head   whose GGUF files of the target's model hold its MTP head
    verified    whether the file names were seen in a public source; a pull checks them in any case
    acceptance  measured for this pair; None where nothing was measured
    """

    target: Reference
    draft: Reference | None = None
    verified: bool = False
    acceptance: Acceptance | None = None
    pard: Reference | None = None
    pard_token: int | None = None
    head: Reference | None = None
    head_kind: HeadKind | None = None
    head_verified: bool = False
    with_head: Reference | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One alias: the pair for llama.cpp (`gguf`), the pair for MLX, sampling defaults, and what there is to know.

    originals  where the weights of both pairs come from
    """

    alias: str
    description: str
    gguf: Pair | None
    mlx: Pair | None
    sampling: SamplingDefaults
    about: About = field(default_factory=About)
    originals: Originals = field(default_factory=Originals)

    def pair(self, backend: FileBackend) -> Pair | None:
        """The pair for `backend`, or None."""
        return self.gguf if backend == "llamacpp" else self.mlx


@dataclass(frozen=True, slots=True)
class Registry:
    """All known aliases, in file order."""

    entries: Mapping[str, Entry]

    @property
    def default(self) -> str:
        """What is opened where no model is named: the reference in EDGESPEC_MODEL, else the first model for chats whose
        package is installed, else the embedded pair.
        """
        if named := os.environ.get("EDGESPEC_MODEL"):
            return named
        packaged = (
            alias for alias, each in self.entries.items() if each.gguf and isinstance(each.gguf.target, PackagedFile)
        )
        return next((alias for alias in packaged if alias != EMBEDDED_ALIAS), EMBEDDED_ALIAS)

    def get(self, alias: str) -> Entry:
        """The entry of `alias`. Raises UnknownModel, which names the nearest aliases."""
        entry = self.entries.get(alias)
        if entry is not None:
            return entry
        near = difflib.get_close_matches(alias, self.entries, n=3, cutoff=0.5)
        suggestion = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UnknownModel(
            f"There is no model called {alias!a}.{suggestion}", hint="Run `edgespec list` to see the known models."
        )


def config_dir() -> Path:
    """The user's configuration folder: EDGESPEC_CONFIG_DIR, or the platform's folder."""
    override = os.environ.get("EDGESPEC_CONFIG_DIR")
    if override:
        return Path(override).expanduser()
    import platformdirs

    return platformdirs.user_config_path("edgespec")


def load_registry(user_file: Path | None = None) -> Registry:
    """The shipped aliases, with those of the user merged over them key by key.

    `user_file` defaults to models.toml in `config_dir()` and may be missing. Raises RegistryError, which names file,
    table and key, and CacheError if the file cannot be read.
    """
    path = user_file or config_dir() / _FILE_NAME
    try:
        with reading(path):
            try:
                text = path.read_text(encoding="utf-8")
            except (FileNotFoundError, NotADirectoryError):
                text = ""
    except UnicodeDecodeError as error:
        raise RegistryError(f"{path} is not UTF-8 text (byte {error.start}).", hint=f"Save {path} as UTF-8.") from None
    tables = _merge(_parse_file(_read_shipped(), _FILE_NAME), _parse_file(text, str(path)))
    return Registry({alias: _make_entry(alias, table, str(path)) for alias, table in tables.items()})


def _read_shipped() -> str:
    """models.toml of the installed package, or of a source checkout."""
    package = importlib.resources.files("edgespec")
    for place in (package.joinpath(_FILE_NAME), Path(str(package)).parent / _FILE_NAME):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise RegistryError("The list of models is missing from this installation.", hint="Install edgespec again.")


def _merge(base: dict[str, Table], over: dict[str, Table]) -> dict[str, Table]:
    """The tables of both by alias, key by key; what was stated for a model that `over` replaces is dropped."""
    merged = {alias: dict(table) for alias, table in base.items()}
    for alias, table in over.items():
        entry = merged.setdefault(alias, {})
        replaced = table.get("gguf", {}).keys() | table.get("mlx", {}).keys()
        if "originals" in entry:
            entry["originals"] = {role: text for role, text in entry["originals"].items() if role not in replaced}
        for key, value in table.items():
            if not isinstance(value, dict):
                entry[key] = value
                continue
            stale = {"acceptance"} if {"target", "draft"} & value.keys() else set()  # measured for another pair
            stale |= {"pard_token"} if "pard" in value else set()  # of another model
            stale |= {"head_kind", "head_verified"} if "head" in value else set()  # of another head
            kept = {name: known for name, known in entry.get(key, {}).items() if name not in stale}
            entry[key] = kept | value
    return merged


def is_repository(text: object) -> bool:
    """Tells whether `text` names a repository, `user/repo`, and nothing in it."""
    try:
        return isinstance(text, str) and parse_reference(f"hf:{text}") == HubRepo(text)
    except UnknownModel:
        return False


# A check is a test of a value, and what is wrong with one that fails it.

Check = tuple[Callable[[Any], bool], str]


def _within(low: float, high: float, *, whole: bool = False) -> Check:
    kinds = (int,) if whole else (int, float)

    def test(value: Any) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high

    return test, f"is not a {'whole ' if whole else ''}number from {low:g} to {high:g}"


def _is_acceptance(value: Any) -> bool:
    match value:
        case [int() | float() as low, int() | float() as high]:
            return 0 <= low <= high <= 1
    return False


_ANY: Check = (lambda value: True, "")
_TEXT: Check = (lambda value: isinstance(value, str), "is not text")
_FLAG: Check = (lambda value: isinstance(value, bool), "is not true or false")
_BILLIONS: Check = (_within(1e-9, 1e9)[0], "is not a positive number of billions")
_ENTRY_CHECKS: dict[str, Check] = {
    "description": _TEXT,
    **dict.fromkeys(("gguf", "mlx", "sampling", "originals"), _ANY),
    "parameters": _BILLIONS,
    "active": _BILLIONS,
    "license": _TEXT,
    "tasks": (
        lambda value: isinstance(value, list) and all(task in TASKS for task in value),
        f"is not a list of {', '.join(TASKS)}",
    ),
}
_PAIR_CHECKS: dict[str, Check] = {
    **dict.fromkeys(_REFERENCES, _TEXT),
    "pard_token": (_within(0, 2**31 - 1, whole=True)[0], "is not a token id"),
    "head_kind": (lambda value: value in HEAD_KINDS, f"is not one of {', '.join(HEAD_KINDS)}"),
    "head_verified": _FLAG,
    "acceptance": (_is_acceptance, "is not two numbers from 0 to 1, the smaller one first"),
    "verified": _FLAG,
}
_ORIGINALS_CHECKS: dict[str, Check] = dict.fromkeys(
    ROLES, (is_repository, "is not a repository such as Qwen/Qwen3-32B")
)
_SAMPLING_CHECKS: dict[str, Check] = {  # the fields of SamplingDefaults
    option.name: _within(*option.limits, whole=option.kind is int) for option in (*SAMPLING[:4], MAX_TOKENS)
}
_PARTS = {
    "gguf": _PAIR_CHECKS,
    "mlx": _PAIR_CHECKS,
    "sampling": _SAMPLING_CHECKS,
    "originals": _ORIGINALS_CHECKS,
}


def _parse_file(text: str, origin: str) -> dict[str, Table]:
    """Parse one file and validate every key. No key is required here, because a user's file may change a few only."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RegistryError(f"{origin} is not valid TOML: {error}.", hint=f"Correct {origin}.") from None
    tables: dict[str, Table] = {}
    for alias, value in raw.items():
        where = f"{origin}, [{alias}]"
        if not _is_alias(alias):
            raise _schema_error(where, "a model name is letters, digits, dots, dashes and underscores")
        table = tables[alias] = _check_table(where, value, _ENTRY_CHECKS)
        for name in _PARTS.keys() & table.keys():
            where = f"{origin}, [{alias}.{name}]"
            part = table[name] = _check_table(where, table[name], _PARTS[name])
            if _PARTS[name] is _PAIR_CHECKS:
                part |= {key: _parse(where, key, part[key]) for key in _REFERENCES if key in part}
    return tables


def _is_alias(name: str) -> bool:
    try:
        return isinstance(parse_reference(name), Alias)
    except UnknownModel:
        return False


def _check_table(where: str, value: object, checks: Mapping[str, Check]) -> Table:
    """A copy of a table whose keys are all known and right."""
    if not isinstance(value, dict):
        raise _schema_error(where, "it is a single value, not a table")
    for key, each in value.items():
        if key not in checks:
            near = difflib.get_close_matches(key, checks, n=1, cutoff=0.0)[0]
            raise _schema_error(where, f"the key {key!a} is not known; the nearest is {near!a}")
        is_right, wrong = checks[key]
        if not is_right(each):
            raise _schema_error(where, f"{key} {wrong}")
    return dict(value)


def _parse(where: str, key: str, text: str) -> Reference | None:
    """The model that a key of a pair names."""
    if key == "draft" and text == NO_DRAFT:
        return None
    try:
        reference = parse_reference(text)
    except UnknownModel as error:
        raise _schema_error(where, f"{key}: {error.message.removesuffix('.')}") from None
    if isinstance(reference, Alias):
        raise _schema_error(where, f"{key} is another alias ({text}); name a file or a repository")
    if key == "package" and not isinstance(reference, PackagedFile):
        raise _schema_error(where, f"package is {text!a}, not package:NAME/FILE")
    return reference


def _make_entry(alias: str, table: Table, origin: str) -> Entry:
    pairs = {
        name: _make_pair(f"{origin}, [{alias}.{name}]", table[name]) if name in table else None
        for name in ("gguf", "mlx")
    }
    if not any(pairs.values()):
        raise _schema_error(f"{origin}, [{alias}]", "it has neither a gguf nor an mlx table")
    stated = {key: table[key] for key in _ABOUT if key in table}
    about = About(**{**stated, "tasks": tuple(stated.get("tasks", ()))})
    sampling, originals = SamplingDefaults(**table.get("sampling", {})), Originals(**table.get("originals", {}))
    return Entry(alias, table.get("description", ""), pairs["gguf"], pairs["mlx"], sampling, about, originals)


def _make_pair(where: str, table: Table) -> Pair:
    if "target" not in table:
        raise _schema_error(where, "the key 'target' is missing")
    if ("head" in table) != ("head_kind" in table):
        raise _schema_error(where, "head and head_kind need each other")
    stated = {key: value for key, value in table.items() if key != "package"}
    package = table.get("package")
    if package is not None and find_packaged(package) is not None:
        stated["target"] = package
    if "acceptance" in table:
        low, high = table["acceptance"]
        stated["acceptance"] = float(low), float(high)
    return Pair(**stated)


def _schema_error(where: str, detail: str) -> RegistryError:
    return RegistryError(f"{where}: {detail}.", hint=f"Correct {where}.")


# Repositories of a model's original weights on Hugging Face, which other engines load.


_KEYS = (  # of a GGUF file, the surest first: what it was converted from, what it is, what it was made from
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.source.url",
    "general.repo_url",
    "general.base_model.0.repo_url",
)
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", re.MULTILINE)  # of a README's first lines
_ADDRESS = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/)?([\w.-]+/[\w.-]+?)(?:/tree/[^/]+)?/?")


def find_original(reference: Reference, registry: Registry, *, is_head: bool = False) -> str | None:
    """The original of a model that an alias names; None where the registry states none.

    `is_head`: a head or a PARD model, which may lie in the repository of its target.
    """
    roles = ROLES[2:] if is_head else ROLES[:2]
    for entry in registry.entries.values():
        for pair in filter(None, (entry.gguf, entry.mlx)):
            for role in roles:
                known, found = getattr(pair, role), getattr(entry.originals, role)
                if found and getattr(known, "repo", known) == getattr(reference, "repo", reference):
                    return str(found)
    return None


def read_gguf_original(header: Header) -> tuple[str, str] | None:
    """(repository, the key that names it) of the weights that a GGUF file was made from; None where it does not say.

    A fine-tune's base model is not its original: a repository without the name of the fine-tune is left out.
    """
    tune = header.metadata.get("general.finetune")
    for key in _KEYS:
        text = header.metadata.get(key)
        match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not is_repository(match[1]):
            continue
        is_base = "base_model" in key and isinstance(tune, str) and tune.lower() not in match[1].lower()
        if not is_base:
            return match[1], key
    return None


def read_folder_original(folder: Folder) -> tuple[str, str] | None:
    """Does the same for a folder that MLX has quantized: what its README or its config names."""
    for found, key in (
        (_read_base_model(folder.path), "base_model of its README"),
        (folder.config.get("_name_or_path"), "_name_or_path of its config.json"),
    ):
        if isinstance(found, str) and is_repository(found):
            return found, key
    return None


def _read_base_model(folder: Path) -> str | None:
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    header = text.split("\n---", 1)[0] if text.startswith("---") else ""
    match = _BASE_MODEL.search(header)
    return match[1] if match else None


# Files that come in Python packages: the embedded pair in this one, weights in others.


def find_packaged(reference: PackagedFile) -> Path | None:
    """The file on this machine, in edgespec's assets or in another installed package; None where it is in neither.

    No package is imported for it.
    """
    first, _, rest = reference.path.partition("/")
    folders = [_find_assets() / first]
    if first.isidentifier() and (spec := importlib.util.find_spec(first)) is not None:
        folders += [Path(folder) for folder in spec.submodule_search_locations or ()]
    return next((folder / rest for folder in folders if (folder / rest).is_file()), None)


def name_packaged(path: Path) -> PackagedFile:
    """The reference of a file that `find_packaged` has found."""
    assets = _find_assets()
    inner = path.relative_to(assets if path.is_relative_to(assets) else path.parent.parent)
    return PackagedFile(inner.as_posix())


def _find_assets() -> Path:
    return Path(str(importlib.resources.files("edgespec"))) / "assets"
