"""The models.toml that comes with the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from edgespec.errors import RegistryError

FILE_NAME = "models.toml"


def read_shipped() -> str:
    """models.toml of the installed package, or of a source checkout. Raises RegistryError."""
    package = importlib.resources.files("edgespec")
    for place in (package.joinpath(FILE_NAME), Path(str(package)).parent / FILE_NAME):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise RegistryError("The list of models is missing from this installation.", hint="Install edgespec again.")
