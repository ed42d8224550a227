"""models.toml: aliases with target and draft. The user's file is merged over the shipped one; both are validated."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from edgespec.errors import CacheError, RegistryError, UnknownModel
from edgespec.formats.heads import HeadKind
from edgespec.hub.cache import Alias, PackagedFile, Reference, parse_reference
from edgespec.registry.originals import (
    ABOUT_KEYS,
    FILE_NAME,
    About,
    Originals,
    Table,
    find_about_error,
    find_originals_error,
    find_packaged,
    merge_tables,
    read_about,
    read_shipped,
)

if TYPE_CHECKING:
    from edgespec.backends import FileBackend
    from edgespec.core.sampling import SamplingParams

EMBEDDED_ALIAS = "python-6m"
NO_DRAFT = "ngram"
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

Acceptance = tuple[float, float]
"""Acceptance rates (alpha, from 0 to 1) of a draft model: on less predictable texts, and on more predictable ones."""

_HEAD_KEYS = ("head", "head_kind", "head_verified", "with_head")
_ENTRY_KEYS = ("description", "gguf", "mlx", "sampling", "originals", *ABOUT_KEYS)
_PAIR_KEYS = ("target", "package", "draft", "pard", "pard_token", *_HEAD_KEYS, "acceptance", "verified")
_REFERENCES = ("target", "package", "draft", "pard", "head", "with_head")
# Key: whether it must be an integer, minimum, maximum.
_SAMPLING: dict[str, tuple[bool, float, float]] = {
    "temperature": (False, 0.0, 100.0),
    "top_k": (True, 0.0, 2.0**31 - 1),
    "top_p": (False, 0.0, 1.0),
    "min_p": (False, 0.0, 1.0),
    "max_tokens": (True, 1.0, 2.0**31 - 1),
}


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
    draft: Reference | None
    verified: bool
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
    tables, origin = _parse_file(read_shipped(), FILE_NAME), FILE_NAME
    path = user_file or config_dir() / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        text = None
    except UnicodeDecodeError as error:
        raise RegistryError(f"{path} is not UTF-8 text (byte {error.start}).", hint=f"Save {path} as UTF-8.") from None
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}.", hint="Check its permissions.") from error
    if text is not None:
        tables, origin = merge_tables(tables, _parse_file(text, str(path))), str(path)
    return Registry({alias: _make_entry(alias, table, origin) for alias, table in tables.items()})


def _parse_file(text: str, origin: str) -> dict[str, Table]:
    """Parse one file and validate every key. No key is required here, because a user's file may change a few only."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RegistryError(f"{origin} is not valid TOML: {error}.", hint=f"Correct {origin}.") from None
    tables: dict[str, Table] = {}
    for alias, value in raw.items():
        where = f"[{alias}]"
        if not _is_alias(alias):
            raise _schema_error(origin, where, "a model name is letters, digits, dots, dashes and underscores")
        table = _check_table(origin, where, value, _ENTRY_KEYS)
        if not isinstance(table.get("description", ""), str):
            raise _schema_error(origin, where, "description is not text")
        if (problem := find_about_error(table) or find_originals_error(table.get("originals", {}))) is not None:
            raise _schema_error(origin, where, problem)
        for name in ("gguf", "mlx"):
            if name in table:
                table[name] = _check_pair(origin, f"[{alias}.{name}]", table[name])
        if "sampling" in table:
            table["sampling"] = _check_sampling(origin, f"[{alias}.sampling]", table["sampling"])
        tables[alias] = table
    return tables


def _is_alias(name: str) -> bool:
    try:
        return isinstance(parse_reference(name), Alias)
    except UnknownModel:
        return False


def _check_table(origin: str, where: str, value: object, known: tuple[str, ...]) -> Table:
    if not isinstance(value, dict):
        raise _schema_error(origin, where, "it is a single value, not a table")
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise _schema_error(origin, where, f"the key {key!a} is not known; the nearest is {near!a}")
    return dict(value)


def _check_pair(origin: str, where: str, value: object) -> Table:
    table = _check_table(origin, where, value, _PAIR_KEYS)
    for key in _REFERENCES:
        if key not in table or (key == "draft" and table[key] == NO_DRAFT):
            continue
        text = table[key]
        if not isinstance(text, str):
            raise _schema_error(origin, where, f"{key} is not text")
        try:
            reference = parse_reference(text)
        except UnknownModel as error:
            raise _schema_error(origin, where, f"{key}: {error.message.removesuffix('.')}") from None
        if isinstance(reference, Alias):
            raise _schema_error(origin, where, f"{key} is another alias ({text}); name a file or a repository")
        if key == "package" and not isinstance(reference, PackagedFile):
            raise _schema_error(origin, where, f"package is {text!a}, not package:NAME/FILE")
        table[key] = reference
    for key in ("verified", "head_verified"):
        if not isinstance(table.get(key, False), bool):
            raise _schema_error(origin, where, f"{key} is not true or false")
    token = table.get("pard_token")
    if token is not None and (isinstance(token, bool) or not isinstance(token, int) or token < 0):
        raise _schema_error(origin, where, "pard_token is not a token id")
    if (kind := table.get("head_kind")) is not None and kind not in HEAD_KINDS:
        raise _schema_error(origin, where, f"head_kind is {kind!a}, not one of {', '.join(HEAD_KINDS)}")
    if "acceptance" in table:
        table["acceptance"] = _check_acceptance(origin, where, table["acceptance"])
    return table


def _check_acceptance(origin: str, where: str, value: object) -> Acceptance:
    match value:
        case [int() | float() as low, int() | float() as high] if 0 <= low <= high <= 1:
            return float(low), float(high)
    raise _schema_error(origin, where, "acceptance is not two numbers from 0 to 1, the smaller one first")


def _check_sampling(origin: str, where: str, value: object) -> Table:
    table = _check_table(origin, where, value, tuple(_SAMPLING))
    for key, number in table.items():
        whole, smallest, largest = _SAMPLING[key]
        kinds = (int,) if whole else (int, float)
        if isinstance(number, bool) or not isinstance(number, kinds):
            raise _schema_error(origin, where, f"{key} is not a {'whole ' if whole else ''}number")
        if not smallest <= number <= largest:
            raise _schema_error(origin, where, f"{key} is {number}; it must be from {smallest:g} to {largest:g}")
    return table


def _make_entry(alias: str, table: Table, origin: str) -> Entry:
    pairs = {name: _make_pair(alias, name, table, origin) for name in ("gguf", "mlx")}
    if not any(pairs.values()):
        raise _schema_error(origin, f"[{alias}]", "it has neither a gguf nor an mlx table")
    sampling, originals = table.get("sampling", {}), table.get("originals", {})
    assert isinstance(sampling, dict) and isinstance(originals, dict)
    description, defaults = str(table.get("description", "")), SamplingDefaults(**sampling)
    about = read_about(table)
    return Entry(alias, description, pairs["gguf"], pairs["mlx"], defaults, about, Originals(**originals))


def _make_pair(alias: str, name: str, table: Table, origin: str) -> Pair | None:
    pair = table.get(name)
    if not isinstance(pair, dict):
        return None
    if "target" not in pair:
        raise _schema_error(origin, f"[{alias}.{name}]", "the key 'target' is missing")
    if ("head" in pair) != ("head_kind" in pair):
        raise _schema_error(origin, f"[{alias}.{name}]", "head and head_kind need each other")
    draft = pair.get("draft", NO_DRAFT)
    verified = bool(pair.get("verified", False))
    package = pair.get("package")
    return Pair(
        pair["target"] if package is None or find_packaged(package) is None else package,
        None if draft == NO_DRAFT else draft,
        verified,
        pair.get("acceptance"),
        **{key: pair[key] for key in ("pard", "pard_token", *_HEAD_KEYS) if key in pair},
    )


def _schema_error(origin: str, where: str, detail: str) -> RegistryError:
    return RegistryError(f"{origin}, {where}: {detail}.", hint=f"Correct {where} in {origin}.")
