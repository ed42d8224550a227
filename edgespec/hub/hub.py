"""The model hub: what a reference means there, its GGUF header without the weights, and downloads into the cache.

The client reads HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE once, when it is first imported. A `Hub` reads them when it is
made and passes them on with every call, so a changed environment counts for the next `Hub`; only the token file's place
(HF_HOME) and the timeouts stay those of the first import. HF_TOKEN is read by the client at each request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import HubError, InvalidModelFile
from edgespec.formats.gguf import Header, join_parts, read_header
from edgespec.formats.gguf_validate import check_model, read_file
from edgespec.hub import cache
from edgespec.hub.cache import CachedModel, RemoteModel
from edgespec.hub.download import Progress, RangeReader, check_room, checksum_error, describe, download_blob
from edgespec.hub.errors import HubContext, HubUnreachable, map_errors, not_a_hub, offline
from edgespec.hub.file_selection import RemoteFile, select
from edgespec.hub.reference import HubFile, HubReference

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub and the cache its files go to; `offline` means that no request is sent."""

    endpoint: str
    cache_dir: Path
    offline: bool = False

    @classmethod
    def from_environment(cls) -> Hub:
        """The hub that HF_ENDPOINT, HF_HOME (and its relatives) and HF_HUB_OFFLINE describe now."""
        switch = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        return cls(endpoint, cache.cache_dir_from_environment(), switch.upper() in _TRUE)

    def cached(self, reference: HubReference) -> RemoteModel | None:
        """The model in the cache, if all its files are there; sends no request."""
        return cache.cached_model(self.cache_dir, reference, self.endpoint)

    def resolve(self, reference: HubReference) -> RemoteModel:
        """What `reference` means on the hub now: commit, files, sizes; nothing is downloaded.

        Offline, or when the hub cannot be reached, the cached model serves. Raises HubError.
        """
        subject = self._subject(reference)
        if self.offline:
            found = self.cached(reference)
            if found is None:
                raise offline(subject)
            return found
        try:
            return self._ask(reference, subject)
        except HubUnreachable:
            found = self.cached(reference)
            if found is None:
                raise
            return found

    def header(self, model: RemoteModel) -> Header:
        """The GGUF header, all parts joined; from the cache, else by range requests for its first bytes.

        Raises InvalidModelFile, HubError, CacheError.
        """
        if model.kind != "gguf":
            raise InvalidModelFile(f"{model.repo} is an MLX model and has no GGUF header.", hint="use --backend mlx")
        return join_parts([self._part_header(model, file) for file in model.files])

    def fetch(self, model: RemoteModel, progress: Progress | None = None) -> Path:
        """Have all files of `model` in the cache; returns the GGUF file to open, or the MLX folder.

        What is cached is reused, what an earlier try left is resumed, and every new file is checked by size and hash
        (and a GGUF by its header) before this returns. Raises HubError, CacheError, InvalidModelFile.
        """
        for file in model.files:
            self._fetch_file(model, file, progress)
        if not self.offline:
            with map_errors(self._subject_of(model)):
                cache.remember_revision(self.cache_dir, model)
        first = cache.snapshot_path(self.cache_dir, model, model.files[0].path)
        return first if model.kind == "gguf" else first.parent

    def verify(self, model: RemoteModel, progress: Callable[[str], None] | None = None) -> None:
        """Read every cached file of `model` in full and compare its hash; `progress` gets each file's name first.

        Raises InvalidModelFile for a damaged file, which is removed so that the next pull fetches it anew.
        """
        for file in model.files:
            link = cache.snapshot_path(self.cache_dir, model, file.path)
            if not link.is_file():
                continue
            if progress:
                progress(file.path)
            with map_errors(self._subject_of(model)):
                difference = checksum_error(link, link.resolve().name, file.size)
                if difference is not None:
                    cache.discard(link)
                    raise InvalidModelFile(
                        f"{file.path} in the cache is damaged: {difference}; the bad copy was removed.",
                        hint="pull it again: edgespec pull",
                    )

    def cached_models(self) -> list[CachedModel]:
        """Every model the cache holds whole; sends no request."""
        with map_errors(HubContext(self.endpoint, str(self.cache_dir), "")):
            return cache.cached_models(self.cache_dir)

    def remove(self, reference: HubReference) -> int:
        """Remove a model from the cache; returns the bytes freed. Raises HubError where it is not cached."""
        with map_errors(self._subject(reference)):
            return cache.remove_model(self.cache_dir, reference)

    def _ask(self, reference: HubReference, subject: HubContext) -> RemoteModel:
        from huggingface_hub import HfApi, constants

        api = HfApi(endpoint=self.endpoint, library_name="edgespec")
        revision = reference.revision or cache.DEFAULT_REVISION
        with map_errors(subject):
            try:
                info = api.model_info(
                    reference.repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
                )
            except (KeyError, TypeError, AttributeError):
                raise not_a_hub(subject) from None
        listing = tuple(
            RemoteFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None)
            for each in info.siblings or []
        )
        if info.sha is None or not cache.is_commit(info.sha):
            raise not_a_hub(subject)
        named = replace(subject, names=tuple(file.path for file in listing))
        chosen = select(reference, listing, named)
        return RemoteModel(reference.repo, revision, info.sha, chosen.kind, chosen.files)

    def _part_header(self, model: RemoteModel, file: RemoteFile) -> Header:
        local = cache.snapshot_path(self.cache_dir, model, file.path)
        if local.is_file():
            return read_file(local)
        subject = self._subject_of(model, file.path)
        if self.offline:
            raise offline(subject)
        with map_errors(subject):
            remote = describe(model.repo, file.path, model.commit, self.endpoint)
            header = read_header(RangeReader(remote.url, remote.size), file.path)
        check_model(header)
        return header

    def _fetch_file(self, model: RemoteModel, file: RemoteFile, progress: Progress | None) -> None:
        from huggingface_hub import constants, hf_hub_download

        link = cache.snapshot_path(self.cache_dir, model, file.path)
        if link.is_file() and link.stat().st_size == file.size:
            return
        subject = self._subject_of(model, file.path)
        if self.offline:
            raise offline(subject)
        with map_errors(subject):
            if link.is_file():
                cache.discard(link)
            storage = cache.storage_folder(self.cache_dir, model.repo)
            remote = describe(model.repo, file.path, model.commit, self.endpoint)
            check_room(remote, storage)
            # Larger files the hub sends only over the client's own Xet transport, which does not resume.
            plain = remote.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
            if plain:
                download_blob(remote, storage, cache.blob_lock(self.cache_dir, model.repo, remote.etag), progress)
            try:
                hf_hub_download(
                    model.repo, file.path, revision=model.commit, cache_dir=self.cache_dir, endpoint=self.endpoint
                )
            except ValueError as error:
                raise HubError(
                    f"{file.path} is too large for a plain download ({remote.size / 2**30:,.1f} GiB).",
                    hint="install hf_xet, or choose a smaller quantisation",
                ) from error
        if not plain:
            self.verify(replace(model, files=(file,)))
        if model.kind == "gguf":
            read_file(link)

    def _subject(self, reference: HubReference) -> HubContext:
        path = reference.path if isinstance(reference, HubFile) else None
        revision = reference.revision or cache.DEFAULT_REVISION
        return HubContext(self.endpoint, str(self.cache_dir), reference.repo, revision, path)

    def _subject_of(self, model: RemoteModel, path: str | None = None) -> HubContext:
        return HubContext(self.endpoint, str(self.cache_dir), model.repo, model.revision, path)
