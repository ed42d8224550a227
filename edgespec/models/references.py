"""References to models: each form that a user can type is a type."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import UnknownModel

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
    if not is_safe(path):
        raise _reference_error(text, "the file name leaves its folder or has an empty part")
    return path


def _add_revision(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo}@{revision}"


def _reference_error(text: str, reason: str, *, hint: str = FORMS) -> UnknownModel:
    shown = text if len(text) <= 120 else text[:117] + "..."
    return UnknownModel(f"{shown!a} is not a model reference: {reason}.", hint=hint)


def is_safe(path: str) -> bool:
    return "\\" not in path and ":" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


DEFAULT_REVISION = "main"
