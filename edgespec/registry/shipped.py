"""Files that come in Python packages: models.toml and the embedded pair in this one, weights in others."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

from edgespec.errors import RegistryError
from edgespec.hub.reference import PackagedFile

FILE_NAME = "models.toml"


def read_shipped() -> str:
    """models.toml of the installed package, or of a source checkout. Raises RegistryError."""
    package = importlib.resources.files("edgespec")
    for place in (package.joinpath(FILE_NAME), Path(str(package)).parent / FILE_NAME):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise RegistryError("The list of models is missing from this installation.", hint="Install edgespec again.")


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
