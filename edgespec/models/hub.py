"""The model hub: resolution of references, GGUF headers without the weights, and downloads into the cache.

The client reads HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE once, when it is first imported. `Hub.from_environment` reads
them at each call and passes them to the client explicitly. Only the timeouts and the location of the token file
(HF_HOME) keep their values from the first import. The client reads HF_TOKEN at each request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache as cache_once
from pathlib import Path
from typing import Any

from edgespec.errors import HubError
from edgespec.formats.gguf import ByteSource, FileSource, Header, join_parts, read_header
from edgespec.formats.gguf_validate import check_model, read_file
from edgespec.formats.mlx_folder import read_safetensors_shapes
from edgespec.models import cache
from edgespec.models.cache import CachedModel, RemoteModel
from edgespec.models.download import (
    RangeReader,
    check_disk_space,
    checksum_error,
    damaged_error,
    download_file,
)
from edgespec.models.file_selection import RemoteFile, select_files
from edgespec.models.hub_errors import NO_HUB, OFFLINE, HubContext, HubUnreachable, make_error, map_errors
from edgespec.models.references import DEFAULT_REVISION, HubFile, HubReference
from edgespec.proxies import is_on_this_machine, open_client

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")


@cache_once
def _ask_without_proxy() -> None:
    """Have the hub's client, which every request shares, ask a mirror on this machine without the proxy."""
    import httpx
    from huggingface_hub import set_client_factory

    set_client_factory(lambda: open_client(httpx.Client, "http://localhost", follow_redirects=True, timeout=None))


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub and the cache of its files; with `offline`, no request is sent."""

    endpoint: str
    cache_dir: Path
    offline: bool = False

    def __post_init__(self) -> None:
        if is_on_this_machine(self.endpoint) and not self.offline:
            _ask_without_proxy()

    @classmethod
    def from_environment(cls) -> Hub:
        """The hub of HF_ENDPOINT, HF_HOME and related variables, and HF_HUB_OFFLINE."""
        switch = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        return cls(endpoint, cache.locate_cache_dir(), switch.upper() in _TRUE)

    def find_cached(self, reference: HubReference) -> RemoteModel | None:
        """The model in the cache, if all its files are there; None otherwise. Sends no request."""
        return cache.find_model(self.cache_dir, reference)

    def resolve(self, reference: HubReference) -> RemoteModel:
        """The commit, files and sizes of the model that `reference` names; nothing is downloaded.

        Offline, or if the hub cannot be reached, the cached model is returned. Raises HubError.
        """
        context = self._make_context(reference)
        try:
            if self.offline:
                raise make_error(OFFLINE, context)
            return self._request_model(reference, context)
        except HubUnreachable:
            found = self.find_cached(reference)
            if found is None:
                raise
            return found

    def header(self, model: RemoteModel) -> Header:
        """The GGUF header, with all parts joined, from the cache or by range requests for the first bytes.

        Raises InvalidModelFile, HubError, CacheError.
        """
        headers = []
        for file in model.files:
            with map_errors(self._make_context(model, file.path)):
                header = read_header(self._open(model, file), file.path)
            check_model(header)
            headers.append(header)
        return join_parts(headers)

    def shapes(self, model: RemoteModel) -> dict[str, tuple[int, ...]]:
        """Shape by name of the tensors in an MLX model's safetensors, from the cache or by range requests.

        Raises InvalidModelFile, HubError, CacheError.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file in model.files:
            if file.path.endswith(".safetensors"):
                with map_errors(self._make_context(model, file.path)):
                    found |= read_safetensors_shapes(self._open(model, file), file.path)
        return found

    def fetch(self, model: RemoteModel) -> Path:
        """Download the missing files of `model` to the cache; returns the GGUF file to open, or the MLX folder.

        Cached files are reused and partial downloads resumed. Every new file is verified by size and hash, and a GGUF
        file by its header. Raises HubError, CacheError, InvalidModelFile, Cancelled.
        """
        for file in model.files:
            self._fetch_file(model, file)
        if not self.offline:
            with map_errors(self._make_context(model)):
                cache.remember_revision(self.cache_dir, model)
        first = cache.snapshot_path(self.cache_dir, model, model.files[0].path)
        return first if model.kind == "gguf" else first.parent

    def verify(self, model: RemoteModel, progress: Callable[[str], None] = lambda path: None) -> None:
        """Read every cached file of `model` and compare its hash; `progress` is called with each file's name first.

        Raises InvalidModelFile for a damaged file, after removing it so that the next pull downloads it again.
        """
        for file in model.files:
            link = cache.snapshot_path(self.cache_dir, model, file.path)
            if not link.is_file():
                continue
            progress(file.path)
            with map_errors(self._make_context(model)):
                difference = checksum_error(link, link.resolve().name, file.size)
                if difference is not None:
                    cache.discard(link)
                    raise damaged_error(file.path, difference)

    def list_models(self) -> list[CachedModel]:
        """Every complete model in the cache. Sends no request."""
        with map_errors(HubContext(self.endpoint, str(self.cache_dir), "")):
            return cache.list_models(self.cache_dir)

    def remove(self, reference: HubReference, confirm: Callable[[], object] = lambda: None) -> int:
        """Remove a model from the cache; returns the bytes freed. Raises HubError if it is not cached.

        `confirm` is called before anything is removed, and what it raises prevents that.
        """
        with map_errors(self._make_context(reference)):
            return cache.remove_model(self.cache_dir, reference, confirm)

    def _request_model(self, reference: HubReference, context: HubContext) -> RemoteModel:
        from huggingface_hub import HfApi, constants

        api = HfApi(endpoint=self.endpoint, library_name="edgespec")
        revision = reference.revision or DEFAULT_REVISION
        with map_errors(context):
            try:
                info = api.model_info(
                    reference.repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
                )
                listing = tuple(map(_read_entry, info.siblings or []))
            except (KeyError, TypeError, AttributeError):
                raise make_error(NO_HUB, context) from None
        if not isinstance(info.sha, str) or not cache.is_commit(info.sha):
            raise make_error(NO_HUB, context)
        named = replace(context, names=tuple(file.path for file in listing))
        return RemoteModel(reference.repo, revision, info.sha, *select_files(reference, listing, named))

    def _open(self, model: RemoteModel, file: RemoteFile) -> ByteSource:
        """The file in the cache, or ranges of that at the hub."""
        local = cache.snapshot_path(self.cache_dir, model, file.path)
        if local.is_file():
            return FileSource(local)
        if self.offline:
            raise make_error(OFFLINE, self._make_context(model, file.path))
        return RangeReader(self._url(model, file), file.size)

    def _fetch_file(self, model: RemoteModel, file: RemoteFile) -> None:
        from huggingface_hub import constants, hf_hub_download

        link = cache.snapshot_path(self.cache_dir, model, file.path)
        if link.is_file() and link.stat().st_size == file.size:
            return
        context = self._make_context(model, file.path)
        if self.offline:
            raise make_error(OFFLINE, context)
        with map_errors(context):
            cache.discard(link)
            blobs = cache.storage_folder(self.cache_dir, model.repo) / "blobs"
            check_disk_space(file, blobs)
            # The hub sends larger files only over the client's Xet transport, which does not resume.
            is_ours = file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
            if is_ours:
                lock = cache.blob_lock(self.cache_dir, model.repo, file.etag or "")
                download_file(file, self._url(model, file), blobs, lock)
            try:
                hf_hub_download(
                    model.repo, file.path, revision=model.commit, cache_dir=self.cache_dir, endpoint=self.endpoint
                )
            except ValueError as error:
                raise HubError(f"{file.path} is too large for a plain download.", hint="Install hf_xet.") from error
        if not is_ours:
            self.verify(replace(model, files=(file,)))
        if model.kind == "gguf":
            read_file(link)

    def _url(self, model: RemoteModel, file: RemoteFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(model.repo, file.path, revision=model.commit, endpoint=self.endpoint)

    def _make_context(self, named: HubReference | RemoteModel, path: str | None = None) -> HubContext:
        path = named.path if isinstance(named, HubFile) else path
        revision = named.revision or DEFAULT_REVISION
        return HubContext(self.endpoint, str(self.cache_dir), named.repo, revision, path)


def _read_entry(entry: Any) -> RemoteFile:
    """A file of a listing. Raises AttributeError and TypeError for what the hub does not send."""
    etag, size = entry.lfs.sha256 if entry.lfs else entry.blob_id, entry.size or 0
    if not (isinstance(entry.rfilename, str) and isinstance(size, int) and isinstance(etag, str | None)):
        raise TypeError
    return RemoteFile(entry.rfilename, size, etag)
