"""models.toml: aliases with target and draft. The user's file is merged over the shipped one; both are validated."""

from __future__ import annotations

import difflib
import importlib.resources
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

from edgespec.errors import RegistryError, UnknownModel, reading
from edgespec.files import parse_toml
from edgespec.formats.heads import HeadKind
from edgespec.models.packaged import find_packaged
from edgespec.models.references import ALIAS, Alias, HubRepo, PackagedFile, Reference, parse_reference
from edgespec.options import MAX_TOKENS, SAMPLING

if TYPE_CHECKING:
    from edgespec.backends import FileBackend
    from edgespec.core.sampling import SamplingParams

ROLES = ("target", "draft", "pard", "head")  # of the models of a pair
EMBEDDED_ALIAS = "python-6m"
NO_DRAFT = "ngram"
Acceptance = tuple[float, float]
"""Acceptance rates (alpha, from 0 to 1) of a draft model: on less predictable texts, and on more predictable ones."""

Task = Literal["chat", "code", "reasoning"]
Table = dict[str, Any]
_FILE_NAME = "models.toml"
_STALE = {  # role -> keys that no longer hold if a user's file names another model for it
    "target": ("acceptance", "package", "verified"),
    "draft": ("acceptance",),
    "pard": ("pard_token",),
    "head": ("head_kind", "head_verified"),
}
_ABOUT = ("parameters", "active", "license", "tasks")
_LIMITS = {option.name: Field(ge=option.low, le=option.high) for option in (*SAMPLING[:4], MAX_TOKENS)}


def is_repository(text: object) -> bool:
    """Tells whether `text` names a repository, `user/repo`, and nothing in it."""
    try:
        return isinstance(text, str) and parse_reference(f"hf:{text}") == HubRepo(text)
    except UnknownModel:
        return False


def _check_repository(text: object) -> object:
    if not is_repository(text):
        raise ValueError("it is not a repository such as Qwen/Qwen3-32B")
    return text


def _check_acceptance(pair: Acceptance) -> Acceptance:
    if not 0 <= pair[0] <= pair[1] <= 1:
        raise ValueError("it is not two numbers from 0 to 1, the smaller one first")
    return pair


def _parse(text: object) -> Reference:
    """The model that a key of a pair names. Raises ValueError."""
    try:
        reference = parse_reference(text) if isinstance(text, str) else None
    except UnknownModel as error:
        raise ValueError(error.message.removesuffix(".")) from None
    if reference is None or isinstance(reference, Alias):
        raise ValueError(f"{text!a} is not a file or a repository")
    return reference


def _prepare_pair(table: object) -> object:
    """A pair's table with the packaged file as its target if `package` names one that is installed."""
    if not isinstance(table, dict):
        return table
    if ("head" in table) != ("head_kind" in table):
        raise ValueError("head and head_kind need each other")
    rest = {key: value for key, value in table.items() if key != "package"}
    package = _parse(table["package"]) if "package" in table else None
    is_installed = isinstance(package, PackagedFile) and find_packaged(package) is not None
    return rest | {"target": table["package"]} if is_installed else rest


_Model = Annotated[Reference, PlainValidator(_parse)]
_Draft = Annotated[Reference | None, PlainValidator(lambda text: None if text == NO_DRAFT else _parse(text))]
_Repository = Annotated[str, AfterValidator(_check_repository)]
_Billions = Annotated[StrictFloat, Field(gt=0, le=1e9)]


class _Table:
    """A table of models.toml, which pydantic validates; unknown keys are errors."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Originals(_Table):
    """`user/repo` of the weights as their authors released them; None if none is stated.

    head  the target's repository if the head lies in the target's own files
    """

    target: _Repository | None = None
    draft: _Repository | None = None
    pard: _Repository | None = None
    head: _Repository | None = None


@dataclass(frozen=True, slots=True)
class About(_Table):
    """What helps to choose a model. None or empty if nothing is stated.

    parameters  of the target, in billions
    active      those of them that one token uses, in a mixture of experts
    license     of the weights, as people call it
    tasks       what the model is known for
    """

    parameters: _Billions | None = None
    active: _Billions | None = None
    license: str | None = None
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingDefaults(_Table):
    """Sampling parameters recommended by a model's authors; None if they give none.

    max_tokens  of an answer, for a model that does not end its answers itself
    """

    temperature: Annotated[StrictFloat | None, _LIMITS["temperature"]] = None
    top_k: Annotated[StrictInt | None, _LIMITS["top_k"]] = None
    top_p: Annotated[StrictFloat | None, _LIMITS["top_p"]] = None
    min_p: Annotated[StrictFloat | None, _LIMITS["min_p"]] = None
    max_tokens: Annotated[StrictInt | None, _LIMITS["max_tokens"]] = None

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
class Pair(_Table):
    """A target and its draft models.

    target      a file of a Python package if `package` names one that is installed
    draft       None: n-gram drafting
    pard        a PARD model, which drafts several tokens in one forward
    pard_token  its mask token; None if its own files name it
    head        a trained head of the target, in files of its own
    head_kind   its kind
    head_verified  whether it was run with this target
    with_head   other GGUF files of the target's model, which hold its MTP head
    verified    whether the file names were seen in a public source; a pull checks them in any case
    acceptance  measured for this pair; None if nothing was measured
    """

    target: _Model
    draft: _Draft = None
    verified: StrictBool = False
    acceptance: Annotated[Acceptance, AfterValidator(_check_acceptance)] | None = None
    pard: _Model | None = None
    pard_token: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    head: _Model | None = None
    head_kind: HeadKind | None = None
    head_verified: StrictBool = False
    with_head: _Model | None = None


_Pair = Annotated[Pair, BeforeValidator(_prepare_pair)]


@dataclass(frozen=True, slots=True)
class Entry(_Table):
    """One alias: the pair for llama.cpp (`gguf`), the pair for MLX, sampling defaults, and what there is to know.

    originals  where the weights of both pairs come from
    """

    alias: str
    description: str = ""
    gguf: _Pair | None = None
    mlx: _Pair | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    about: About = field(default_factory=About)
    originals: Originals = field(default_factory=Originals)

    def pair(self, backend: FileBackend) -> Pair | None:
        return self.gguf if backend == "llamacpp" else self.mlx


@dataclass(frozen=True, slots=True)
class Registry:
    """All known aliases, in file order."""

    entries: Mapping[str, Entry]

    @property
    def default(self) -> str:
        """What is opened if no model is named: the reference in EDGESPEC_MODEL, else the first model for chats whose
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
        origin = " EDGESPEC_MODEL names it." if alias == os.environ.get("EDGESPEC_MODEL") else ""
        raise UnknownModel(
            f"There is no model called {alias!a}.{origin}{suggestion}",
            hint="Run `edgespec list` to see the known models.",
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
    with reading(path):
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            data = b""
    tables = _merge(parse_toml(_read_shipped().encode()), _load_tables(data, path))
    return Registry({alias: _make_entry(alias, table, path) for alias, table in tables.items()})


def _load_tables(data: bytes, path: Path) -> dict[str, Table]:
    try:
        tables = parse_toml(data)
    except ValueError as error:
        raise RegistryError(f"{path} is not valid TOML: {error}.") from None
    for alias, table in tables.items():
        if not ALIAS.fullmatch(alias) or not isinstance(table, dict):
            detail = "a model is a table with a name of letters, digits, dots, dashes and underscores"
            raise _schema_error(path, alias, detail)
    return tables


def _make_entry(alias: str, table: Table, path: Path) -> Entry:
    """Validates a merged table. No key is required in the user's file, which may change a few only."""
    values = {key: value for key, value in table.items() if key not in _ABOUT}
    about = {key: table[key] for key in _ABOUT if key in table}
    try:
        entry = _ENTRY.validate_python({**values, "alias": alias, "about": about})
    except ValidationError as error:
        first = error.errors()[0]
        wrong = "this key is not known" if first["type"] == "unexpected_keyword_argument" else first["msg"]
        place = ".".join(map(str, first["loc"]))
        raise _schema_error(path, alias, f"{place}: {wrong.removeprefix('Value error, ')}") from None
    if entry.gguf is None and entry.mlx is None:
        raise _schema_error(path, alias, "it has neither a gguf nor an mlx table")
    return entry


def _schema_error(path: Path, alias: str, detail: str) -> RegistryError:
    return RegistryError(f"{path}, [{alias}]: {detail}.")


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
        pairs = [table[name] for name in ("gguf", "mlx") if isinstance(table.get(name), dict)]
        replaced = {role for pair in pairs for role in pair}
        if "originals" in entry:
            entry["originals"] = {role: text for role, text in entry["originals"].items() if role not in replaced}
        for key, value in table.items():
            known = entry.get(key)
            if isinstance(value, dict) and isinstance(known, dict):
                stale = {name for role in value for name in _STALE.get(role, ())}
                value = {name: each for name, each in known.items() if name not in stale} | value
            entry[key] = value
    return merged


_ENTRY = TypeAdapter(Entry)
