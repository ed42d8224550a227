"""Search of the hub for models: what its list of repositories says, without a request for each."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.hub.errors import HubContext, HubUnreachable, map_errors, not_a_hub_error
from edgespec.hub.file_selection import Kind
from edgespec.hub.hub import Hub

_LICENSE = "license:"


@dataclass(frozen=True, slots=True)
class FoundRepo:
    """A repository of a search: `downloads` of the last 30 days, `license` as the hub calls it, or None."""

    repo: str
    downloads: int
    license: str | None


def search_repos(hub: Hub, text: str, kind: Kind, *, tags: tuple[str, ...] = (), limit: int) -> list[FoundRepo]:
    """Repositories with all words of `text` in their names, with models of `kind`, the most downloaded first.

    `tags` are the hub's. Raises HubError; HubUnreachable offline.
    """
    from huggingface_hub import HfApi

    context = HubContext(hub.endpoint, str(hub.cache_dir), "models")
    if hub.offline:
        raise HubUnreachable("Offline mode is on.", hint="Unset HF_HUB_OFFLINE to search the hub.")
    api = HfApi(endpoint=hub.endpoint, library_name="edgespec")
    with map_errors(context):
        try:
            listed = api.list_models(search=text or None, filter=[kind, *tags], sort="downloads", limit=limit)
            return [FoundRepo(each.id, each.downloads or 0, _find_license(each.tags or [])) for each in listed]
        except (KeyError, TypeError, AttributeError):
            raise not_a_hub_error(context) from None


def _find_license(tags: list[str]) -> str | None:
    return next((tag.removeprefix(_LICENSE) for tag in tags if tag.startswith(_LICENSE)), None)
