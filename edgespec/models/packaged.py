"""Files that come in Python packages: the embedded pair in this one, weights in others."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

from edgespec.models.references import PackagedFile


def find_packaged(reference: PackagedFile) -> Path | None:
    """The file on this machine, in edgespec's assets or in another installed package; None if it is in neither.

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
