"""Search of the hub for models."""

from __future__ import annotations

from edgespec.models.file_selection import Kind
from edgespec.models.hub import Hub
from edgespec.models.hub_errors import NO_HUB, HubContext, HubUnreachable, make_error, map_errors

_LICENSE = "license:"


def search_repos(
    hub: Hub, text: str, kind: Kind, *, tags: tuple[str, ...] = (), limit: int
) -> list[tuple[str, int, str | None]]:
    """Repositories with all words of `text` in their names, with models of `kind`, the most downloaded first.

    Each is its name, the downloads of the last 30 days, and the license as the hub calls it or None. `tags` are the
    hub's. Raises HubError; HubUnreachable offline.
    """
    from huggingface_hub import HfApi

    context = HubContext(hub.endpoint, str(hub.cache_dir), "models")
    if hub.offline:
        raise HubUnreachable("Offline mode is on.", hint="Unset HF_HUB_OFFLINE to search the hub.")
    api = HfApi(endpoint=hub.endpoint, library_name="edgespec")
    with map_errors(context):
        try:
            listed = api.list_models(search=text or None, filter=[kind, *tags], sort="downloads", limit=limit)
            return [(each.id, each.downloads or 0, _find_license(each.tags or [])) for each in listed]
        except (KeyError, TypeError, AttributeError):
            raise make_error(NO_HUB, context) from None


def _find_license(tags: list[str]) -> str | None:
    return next((tag.removeprefix(_LICENSE) for tag in tags if tag.startswith(_LICENSE)), None)
