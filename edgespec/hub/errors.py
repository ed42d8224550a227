"""One place that turns what the hub client, the network and the disk raise into edgespec's errors."""

from __future__ import annotations

import difflib
import errno
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgespec.errors import CacheError, EdgespecError, HubError

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
FREE_SPACE = "free some space, or set HF_HOME to a folder on a larger disk"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


class HubUnreachable(HubError):
    """The hub could not be asked: network, server or offline mode; a cached copy may serve instead."""


@dataclass(frozen=True, slots=True)
class HubContext:
    """What was asked for when something failed; `names` are the files the repository does have."""

    endpoint: str
    cache_dir: str
    repo: str
    revision: str | None = None
    path: str | None = None
    names: tuple[str, ...] = ()


@contextmanager
def map_errors(subject: HubContext) -> Iterator[None]:
    """Let failures inside the block come out as edgespec's errors; anything unknown passes unchanged."""
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        known = translate(error, subject)
        if known is None:
            raise
        raise known from error


def translate(error: BaseException, subject: HubContext) -> EdgespecError | None:
    """The edgespec error for `error`, or None for one that is no failure of hub, network or disk."""
    import httpx
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return translate(error.__cause__, subject)
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, subject)
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return offline(subject)
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{subject.repo!a} is not a repository name.", hint="repositories are written user/name")
    if isinstance(error, errors.FileMetadataError | json.JSONDecodeError):
        return not_a_hub(subject)
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL | httpx.LocalProtocolError):
        return HubError(f"{subject.endpoint!a} is not a usable hub address.", hint="correct or unset HF_ENDPOINT")
    if isinstance(error, httpx.HTTPError):
        return _network(error, subject)
    if isinstance(error, OSError):
        return _disk(error, subject)
    return None


def offline(subject: HubContext) -> HubUnreachable:
    """The error for something that is not cached while offline mode is on."""
    what = f"{subject.path} of {subject.repo}" if subject.path else subject.repo
    return HubUnreachable(
        f"{what} is not in the cache at {subject.cache_dir}, and offline mode is on.",
        hint="unset HF_HUB_OFFLINE, or name a model that `edgespec list` shows",
    )


def not_a_hub(subject: HubContext) -> HubError:
    """The error for answers that no hub gives: a proxy's page, or another server at HF_ENDPOINT."""
    return HubError(
        f"{subject.endpoint} does not answer like a model hub.", hint="check HF_ENDPOINT and proxy settings"
    )


def no_such_file(subject: HubContext) -> HubError:
    """The error for a file the repository does not have, naming the nearest that it has."""
    near = difflib.get_close_matches(subject.path or "", subject.names, n=3, cutoff=0.3)
    hint = f"nearest: {', '.join(near)}" if near else f"see {subject.endpoint}/{subject.repo}/tree/main"
    return HubError(f"{subject.repo} has no file {subject.path}.", hint=hint)


def _refused(error: Exception, subject: HubContext) -> EdgespecError:
    from huggingface_hub import errors

    assert isinstance(error, errors.HfHubHTTPError)
    page = f"{subject.endpoint}/{subject.repo}"
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{subject.repo} is gated: its owner gives access only after you accept the terms.",
            hint=f"accept them at {page}, then {LOG_IN}",
        )
    if isinstance(error, errors.DisabledRepoError):
        return HubError(f"{subject.repo} has been disabled by the hub.", hint=f"see {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"There is no repository {subject.repo} at {subject.endpoint}, or it is private.",
            hint=f"check the spelling; if it is private, {LOG_IN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{subject.repo} has no revision {subject.revision}.", hint=f"see the branches and tags at {page}"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return no_such_file(subject)
    return _status(error.response.status_code, subject)


def _status(code: int, subject: HubContext) -> EdgespecError:
    if code == 401:
        return HubError(f"{subject.endpoint} does not accept the access token.", hint=LOG_IN)
    if code == 403:
        return HubError(
            f"Access to {subject.repo} is forbidden for this token.",
            hint=f"give the token read access to it, or {LOG_IN}",
        )
    if code == 429:
        return HubUnreachable(
            f"{subject.endpoint} limits how often it may be asked.", hint=f"wait some minutes; {LOG_IN}"
        )
    if code >= 500:
        return HubUnreachable(
            f"{subject.endpoint} answers with server error {code}.", hint="try again later; a pull resumes"
        )
    return HubError(
        f"{subject.endpoint} refused the request for {subject.repo} (HTTP {code}).", hint="check HF_ENDPOINT"
    )


def _network(error: Exception, subject: HubContext) -> HubUnreachable:
    import httpx

    again = "try again: a pull resumes where it stopped"
    if isinstance(error, httpx.ProxyError):
        return HubUnreachable(f"The proxy for {subject.endpoint} does not work.", hint="check HTTPS_PROXY")
    if any(isinstance(cause, socket.gaierror) for cause in _causes(error)):
        return HubUnreachable(
            f"The name of {subject.endpoint} cannot be resolved.", hint="check the network connection and HF_ENDPOINT"
        )
    if "CERTIFICATE" in str(error).upper():
        return HubUnreachable(
            f"The certificate of {subject.endpoint} is not trusted.", hint="check the clock, or set SSL_CERT_FILE"
        )
    if isinstance(error, httpx.TimeoutException):
        return HubUnreachable(f"{subject.endpoint} did not answer in time.", hint=again)
    if isinstance(error, httpx.ConnectError):
        return HubUnreachable(
            f"{subject.endpoint} cannot be reached.", hint="check the network connection and HF_ENDPOINT"
        )
    return HubUnreachable(f"The connection to {subject.endpoint} broke.", hint=again)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _disk(error: OSError, subject: HubContext) -> CacheError:
    if error.errno in _FULL:
        return CacheError(f"The disk of {subject.cache_dir} is full or its quota is used up.", hint=FREE_SPACE)
    if error.errno in _UNWRITABLE:
        place = error.filename or subject.cache_dir
        return CacheError(
            f"The model cache cannot be written ({place}: {error.strerror}).",
            hint="correct its permissions, or set HF_HOME to a folder of your own",
        )
    return CacheError(
        f"The model cache at {subject.cache_dir} failed: {error.strerror or error}.",
        hint="check the disk, or set HF_HOME to another folder",
    )
