"""The Hugging Face cache on this machine: its location, its models, and the removal of a model.

The layout is the client's (blobs, refs, snapshots). Other tools share the cache, so only links and blobs of the
requested model are changed.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from edgespec.errors import EdgespecError, HubError, UnknownModel
from edgespec.files import write_atomically
from edgespec.formats.mlx_folder import ADAPTER_CONFIG, INDEX, find_missing_shards, read_json
from edgespec.hub.errors import HubContext, missing_file_error

# Model references: each form that a user can type is a type.


FORMS = (
    "Name a model as an alias (edgespec list), user/repo:QUANT, hf:user/repo/file.gguf, or a path such as ./model.gguf."
)

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._-]*))?(?P<rest>[:/].*)?", re.DOTALL
)
_WEB = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(?P<rest>[^?#]*)(?:[?#].*)?", re.IGNORECASE)
_PAGE = re.compile(rf"(?P<repo>{_PART}/{_PART})/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?P<path>/.+)?")
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PATH_STARTS = ("./", "../", "/", "~")
"""How a reference begins that is a path, whatever follows."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Alias:
    """A name from models.toml."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository: an MLX folder, or a GGUF repository of which the preferred quantisation is chosen."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return _add_revision(self.repo, self.revision)


@dataclass(frozen=True, slots=True)
class HubQuant:
    """The GGUF file of a repository with this quantisation in its name."""

    repo: str
    quant: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{_add_revision(self.repo, self.revision)}:{self.quant}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository; `path` is relative, with forward slashes."""

    repo: str
    path: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hf:{_add_revision(self.repo, self.revision)}/{self.path}"


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file in edgespec's assets, `folder/file`, or in another Python package, `package/file`."""

    path: str

    def __str__(self) -> str:
        return f"package:{self.path}"


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A file or folder on this machine, which may not exist."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


HubReference = HubRepo | HubQuant | HubFile
Reference = Alias | HubReference | PackagedFile | LocalPath


def parse_reference(text: str) -> Reference:
    """Parse one reference. The disk is read only to prefer an existing path `user/repo` over a repository.

    A single word is an alias; a folder of that name is written `./name`. The hub's addresses, `hf.co/user/repo:QUANT`
    and those of the pages of a repository and its files, name what they show. Raises UnknownModel.
    """
    if not text.strip():
        raise UnknownModel("The model reference is empty.", hint=FORMS)
    if text != text.strip() or _UNPRINTABLE.search(text):
        raise _reference_error(text, "it has surrounding spaces or unprintable characters")
    if text.startswith("hf:"):
        return _parse_hub(text, text.removeprefix("hf:"))
    if text.startswith("package:"):
        return PackagedFile(_check_inner_path(text, text.removeprefix("package:")))
    if (web := _WEB.fullmatch(text)) is not None:
        return _parse_hub(text, _read_page(web["rest"].rstrip("/")))
    if text.startswith(("http://", "https://")):
        raise _reference_error(text, "web addresses are not accepted", hint="Write hf:user/repo/file.gguf.")
    if _looks_local(text):
        return LocalPath(Path(os.path.expanduser(text)))
    if ALIAS.fullmatch(text):
        return Alias(text)
    return _parse_hub(text, text)


def shorten_names(text: str) -> str:
    """A reference, or several joined by '+', for people: local paths as file names, packaged files without prefix."""
    return "+".join(_shorten_name(part) for part in text.split("+"))


def _shorten_name(text: str) -> str:
    if text.startswith("package:"):
        return text.removeprefix("package:").removesuffix(".gguf")
    return Path(text).name or text if text.startswith(PATH_STARTS) else text


def is_gguf_name(name: str) -> bool:
    """True for names of GGUF files, in either case."""
    return name.lower().endswith(".gguf")


def _looks_local(text: str) -> bool:
    if text in (".", "..") or text.startswith(PATH_STARTS) or is_gguf_name(text):
        return True
    return "/" in text and len(text) < 4096 and os.path.exists(text)


def _read_page(address: str) -> str:
    """A page of a repository or of a file in it as what follows `hf:`."""
    if (page := _PAGE.fullmatch(address)) is None:
        return address
    revision = None if page["revision"] == DEFAULT_REVISION else page["revision"]
    return _add_revision(page["repo"], revision) + (page["path"] or "")


def _parse_hub(text: str, body: str) -> HubReference:
    """`body`: `text` without what marks it as a reference to the hub."""
    match = _HUB.fullmatch(body)
    if match is None or ".." in match["repo"] or "--" in match["repo"]:
        raise _reference_error(text, "it is not an alias, a repository or an existing path")
    repo, revision, rest = match["repo"], match["revision"], match["rest"] or ""
    if rest.startswith(":"):
        if not _QUANTIZATION.fullmatch(rest[1:]):
            raise _reference_error(text, "the part after the colon is not a quantisation such as Q4_K_M")
        return HubQuant(repo, rest[1:], revision)
    if not rest:
        return HubRepo(repo, revision)
    path = _check_inner_path(text, rest[1:])
    if text == body:
        raise _reference_error(text, "a file inside a repository needs the prefix hf:", hint=f"Write 'hf:{text}'.")
    if not is_gguf_name(path):
        raise _reference_error(
            text, "the file does not end in .gguf", hint=f"Name a .gguf file, or the repository: {repo}."
        )
    return HubFile(repo, path, revision)


def _check_inner_path(text: str, path: str) -> str:
    if not _is_safe(path):
        raise _reference_error(text, "the file name leaves its folder or has an empty part")
    return path


def _add_revision(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo}@{revision}"


def _reference_error(text: str, reason: str, *, hint: str = FORMS) -> UnknownModel:
    shown = text if len(text) <= 120 else text[:117] + "..."
    return UnknownModel(f"{shown!a} is not a model reference: {reason}.", hint=hint)


# The files of a repository that a reference names: a quantisation, all parts of a split file, or an MLX folder.


Kind = Literal["gguf", "mlx"]

# The choice for a reference without a quantisation: Q4_K_M, then the nearest in size.
PREFERRED = [
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_S", "Q4_K_L", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_S",
    "Q5_K_M", "Q5_0", "Q3_K_L", "Q3_K_M", "Q6_K", "Q8_0", "BF16", "F16", "F32",
]  # fmt: skip
MLX_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")

_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|F16|F32)[A-Z0-9_]*", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)
_COMPANION = re.compile(r"(?:^|/)(?:mmproj|imatrix|ggml-vocab)[^/]*$", re.IGNORECASE)
_HEAD = re.compile(r"(?:^|/)mtp-[^/]*$", re.IGNORECASE)  # MTP layers in a file beside their model's


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: `size` in bytes; `etag`, where the hub states one, is a sha256 or a git hash."""

    path: str
    size: int
    etag: str | None


Selection = tuple[Kind, tuple[RemoteFile, ...]]
"""The files of one model; the first is the one to open."""


def select_files(reference: HubReference, listing: tuple[RemoteFile, ...], context: HubContext) -> Selection:
    """The files of `listing` that `reference` names. Raises HubError, whose hint names the alternatives."""
    files = {file.path: file for file in listing if _is_safe(file.path)}
    if isinstance(reference, HubFile):
        if reference.path not in files:
            raise missing_file_error(context)
        return _select_parts(files[reference.path], files, context)
    models = [file for file in files.values() if is_model_file(file.path)]
    models = [file for file in models if not _HEAD.search(file.path)] or models
    wanted = [reference.quant] if isinstance(reference, HubQuant) else PREFERRED
    found = next(filter(None, (_find_quant(quant, models) for quant in wanted)), None)
    if found is None and isinstance(reference, HubQuant):
        raise HubError(f"{context.repo} has no {reference.quant}.", hint=_suggest_quants(context, models))
    if not models:
        return _select_mlx(files, context)
    return _select_parts(found or min(models, key=attrgetter("size")), files, context)


def list_parts(path: str) -> tuple[str, ...]:
    """The names of all parts of a split GGUF file, in order; only `path` for a single file."""
    if (match := _SPLIT.fullmatch(path)) is None:
        return (path,)
    parts = int(match["parts"])
    return tuple(f"{match['stem']}-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1))


def parse_quant(path: str) -> str | None:
    """The quantisation in a file name, in upper case; None if there is none."""
    found = _QUANT.findall(path.rsplit("/", 1)[-1])
    return found[-1].upper() if found else None


def _is_safe(path: str) -> bool:
    return "\\" not in path and ":" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def is_model_file(path: str) -> bool:
    """True for GGUF files of a language model; False for projectors, calibration data and later parts."""
    if not is_gguf_name(path) or _COMPANION.search(path):
        return False
    split = _SPLIT.fullmatch(path)
    return split is None or int(split["part"]) == 1


def _find_quant(quant: str, models: list[RemoteFile]) -> RemoteFile | None:
    """The file with `quant` as a whole word in its name; of several, the least nested and shortest one."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [file for file in models if word.search(file.path)]
    return min(found, key=lambda file: (file.path.count("/"), len(file.path), file.path), default=None)


def _select_parts(file: RemoteFile, files: dict[str, RemoteFile], context: HubContext) -> Selection:
    names = list_parts(file.path)
    missing = [name for name in names if name not in files]
    if missing:
        raise HubError(
            f"{context.repo} has {file.path} without its part {missing[0]}.", hint="Choose another quantisation."
        )
    return "gguf", tuple(files[name] for name in names)


def _select_mlx(files: dict[str, RemoteFile], context: HubContext) -> Selection:
    named = [file for file in files.values() if "/" not in file.path]
    wanted = [file for file in named if any(fnmatch.fnmatch(file.path, each) for each in MLX_PATTERNS)]
    wanted.sort(key=lambda file: (file.path.endswith(".safetensors"), file.path))
    if ADAPTER_CONFIG in files and "config.json" not in files:
        raise HubError(
            f"{context.repo} holds a LoRA adapter, which changes the weights of another model.",
            hint="Choose a repository of that model, into which the adapter is merged.",
        )
    if not wanted or not wanted[-1].path.endswith(".safetensors") or "config.json" not in files:
        raise HubError(
            f"{context.repo} holds neither GGUF files nor an MLX model.",
            hint="Choose a repository with .gguf files, or with config.json and .safetensors.",
        )
    return "mlx", tuple(wanted)


def _suggest_quants(context: HubContext, models: list[RemoteFile]) -> str:
    quants = sorted({quant for file in models if (quant := parse_quant(file.path))})
    if not quants:
        return f"See its files at {context.endpoint}/{context.repo}/tree/main"
    return f"Choose one of {', '.join(quants[:20])}."


DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The files of one model at a fixed commit; `revision` is the branch or tag that was resolved."""

    repo: str
    revision: str
    commit: str
    kind: Kind
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache: `reference` opens it, `size` is its bytes, `last_used_s` is in seconds since 1970."""

    reference: HubReference
    commit: str
    kind: Kind
    size: int
    path: Path
    last_used_s: float


def locate_cache_dir() -> Path:
    """The client's cache folder, by the client's rules: HF_HUB_CACHE, then HF_HOME, then XDG_CACHE_HOME."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(stated or os.path.join(home, "hub"))))


def is_commit(text: str) -> bool:
    """True for a full commit hash, as in the names of snapshot folders."""
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def storage_folder(cache_dir: Path, repo: str) -> Path:
    return cache_dir / f"models--{repo.replace('/', '--')}"


def blob_lock(cache_dir: Path, repo: str, etag: str) -> Path:
    """The lock file that the client holds while it writes this blob."""
    return cache_dir / ".locks" / storage_folder(cache_dir, repo).name / f"{etag}.lock"


def remember_revision(cache_dir: Path, model: RemoteModel) -> None:
    """Store the commit of the branch or tag, so that it can be resolved offline."""
    if model.revision == model.commit:
        return
    ref = storage_folder(cache_dir, model.repo) / "refs" / model.revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(ref, model.commit)


def find_model(cache_dir: Path, reference: HubReference) -> RemoteModel | None:
    """The model that `reference` names, if the cache has all its files; None otherwise. Sends no request."""
    storage = storage_folder(cache_dir, reference.repo)
    revision = reference.revision or DEFAULT_REVISION
    commit = _read_commit(storage, revision)
    chosen = _select_complete(reference, storage / "snapshots" / commit) if commit else None
    return RemoteModel(reference.repo, revision, commit, *chosen) if commit and chosen else None


def snapshot_path(cache_dir: Path, model: RemoteModel, path: str) -> Path:
    """The path of a file of `model` in the snapshot, whether or not it exists."""
    return storage_folder(cache_dir, model.repo) / "snapshots" / model.commit / Path(*path.split("/"))


def list_models(cache_dir: Path) -> list[CachedModel]:
    """All complete models in the cache; other repositories are left out."""
    found: list[CachedModel] = []
    for storage in sorted(cache_dir.glob("models--*--*")):
        repo = storage.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted(storage.glob("snapshots/*")):
            found += _list_snapshot_models(repo, snapshot)
    return found


def remove_model(cache_dir: Path, reference: HubReference, confirm: Callable[[], object]) -> int:
    """Remove the model that `reference` names from the cache; returns the bytes freed on disk.

    A reference to a repository removes all its files. Blobs that another revision links to are kept. `confirm` is
    called before. Raises HubError if nothing matches, and what `confirm` raises.
    """
    storage = storage_folder(cache_dir, reference.repo)
    links = [link for snapshot in storage.glob("snapshots/*") for link in _list_named(reference, snapshot)]
    if not links:
        hint = "Run `edgespec list` to see the cached models."
        raise HubError(f"{reference} is not in the cache at {cache_dir}.", hint=hint)
    confirm()
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink()
    kept = {link.resolve() for snapshot in storage.glob("snapshots/*") for link in _list_links(snapshot)}
    freed = 0
    for blob in blobs - kept:
        if blob.is_file():
            freed += blob.stat().st_size
            blob.unlink()
    if not kept:
        shutil.rmtree(storage)  # only unfinished downloads and refs are left
    return freed


def discard(link: Path) -> None:
    """Remove a damaged snapshot file and its blob."""
    blob = link.resolve()
    link.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _read_commit(storage: Path, revision: str) -> str | None:
    try:
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    return commit if is_commit(commit) and (storage / "snapshots" / commit).is_dir() else None


def _list_files(snapshot: Path) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(link.relative_to(snapshot).as_posix(), link.stat().st_size, link.resolve().name)
        for link in sorted(snapshot.rglob("*"))
        if link.is_file()
    )


def _select_complete(
    reference: HubReference, snapshot: Path, listing: tuple[RemoteFile, ...] | None = None
) -> Selection | None:
    """The files of a snapshot that `reference` names; None where some are missing."""
    try:
        chosen = select_files(reference, listing or _list_files(snapshot), HubContext("", "", reference.repo))
    except HubError:
        return None
    return chosen if chosen[0] == "gguf" or _has_all_shards(snapshot) else None


def _has_all_shards(snapshot: Path) -> bool:
    """True if no weight file named in the index is missing; a model in one file has no index."""
    try:
        return not (snapshot / INDEX).is_file() or not find_missing_shards(snapshot, read_json(snapshot / INDEX))
    except EdgespecError:
        return False


def _list_snapshot_models(repo: str, snapshot: Path) -> list[CachedModel]:
    """The models of one snapshot: each GGUF file or complete set of parts, or the whole folder for MLX."""
    is_default = _read_commit(snapshot.parents[1], DEFAULT_REVISION) == snapshot.name
    revision, listing = None if is_default else snapshot.name, _list_files(snapshot)
    references: list[HubReference] = [
        HubFile(repo, file.path, revision) for file in listing if is_model_file(file.path)
    ]
    found = []
    for reference in references or [HubRepo(repo, revision)]:
        if (chosen := _select_complete(reference, snapshot, listing)) is not None:
            kind, files = chosen
            first, size = snapshot / files[0].path, sum(file.size for file in files)
            place = first if kind == "gguf" else snapshot
            found.append(CachedModel(reference, snapshot.name, kind, size, place, first.stat().st_atime))
    return found


def _list_links(snapshot: Path) -> list[Path]:
    return [link for link in snapshot.rglob("*") if not link.is_dir()]


def _list_named(reference: HubReference, snapshot: Path) -> list[Path]:
    """The links of a snapshot that belong to a model, which may be incomplete."""
    storage = snapshot.parent.parent
    if reference.revision is not None and _read_commit(storage, reference.revision) != snapshot.name:
        return []
    links = _list_links(snapshot)
    if isinstance(reference, HubRepo):
        return links
    if isinstance(reference, HubFile):
        named: tuple[str, ...] = list_parts(reference.path)
    else:
        chosen = _select_complete(reference, snapshot)
        named = tuple(file.path for file in chosen[1]) if chosen else ()
    return [link for link in links if link.relative_to(snapshot).as_posix() in named]
