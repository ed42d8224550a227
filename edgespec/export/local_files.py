"""Files on this machine in a container."""

from __future__ import annotations

from edgespec.export.plan import Draft, ExportPlan, list_weights
from edgespec.hub.reference import LocalPath


def mount_files(plan: ExportPlan, draft: Draft | None) -> list[tuple[str, str]]:
    """Volumes that have the files in use at their own paths. Files of the hub's cache are links into another folder."""
    paths = [each.files.path for each in list_weights(plan, draft) if isinstance(each.files, LocalPath)]
    folders = dict.fromkeys(str(folder) for path in paths for folder in (path.parent, path.resolve().parent))
    return [(folder, folder) for folder in folders]
