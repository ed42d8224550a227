"""Every failure of hub, network and disk comes out as one sentence with a hint; most are provoked for real."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from edgespec.errors import CacheError, EdgespecError, HubError
from edgespec.models.hub import Hub
from edgespec.models.hub_errors import HubContext, HubUnreachable, map_errors, translate
from edgespec.models.references import HubFile, HubReference, HubRepo
from tests.models.hubserver import HubServer
from tests.models.hubstate import Fault
from tests.models.serving import FILE, REPO, serve

SUBJECT = HubContext("https://hub.example", "/cache", REPO, "main", FILE)


def failure(hub: Hub, reference: HubReference = HubFile(REPO, FILE)) -> EdgespecError:  # noqa: B008
    """The error of resolving and fetching `reference`."""
    with pytest.raises(EdgespecError) as caught:
        hub.fetch(hub.resolve(reference))
    assert caught.value.hint
    return caught.value


def test_what_the_hub_does_not_have(hub: Hub, root: Path) -> None:
    place = serve(root)
    error = failure(hub, HubRepo("nobody/nothing"))
    assert error.message == f"There is no repository nobody/nothing at {hub.endpoint}, or it is private."
    assert "hf auth login" in error.hint
    error = failure(hub, HubFile(REPO, "Model-Q4_K_S.gguf"))
    assert (error.message, error.hint) == (f"{REPO} has no file Model-Q4_K_S.gguf.", f"The nearest: {FILE}.")
    assert failure(hub, HubFile(REPO, FILE, "v9")).message == f"{REPO} has no revision v9."
    model = hub.resolve(HubFile(REPO, FILE))
    place.unlink()
    with pytest.raises(HubError, match=f"{REPO} has no file {FILE}"):
        hub.fetch(model)


def test_a_wrong_token(hub: Hub, server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(root)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = failure(hub)
    assert "does not accept the access token" in error.message
    assert "HF_TOKEN" in error.hint and "hf auth login" in error.hint
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.fetch(hub.resolve(HubFile(REPO, FILE)))
    assert all(each.authorization == "Bearer hf_right" for each in server.downloads(FILE))


def test_a_gated_repository_points_to_its_page(hub: Hub, server: HubServer, root: Path) -> None:
    serve(root)
    server.fault(REPO, FILE, Fault("status", code=403, error_code="GatedRepo", message="Access is restricted"))
    error = failure(hub)
    assert "gated" in error.message
    assert f"{hub.endpoint}/{REPO}" in error.hint
    with pytest.raises(HubError, match="gated"):
        hub.header(hub.resolve(HubFile(REPO, FILE)))


@pytest.mark.parametrize(
    ("fault", "message", "unreachable"),
    [
        (Fault("status", code=403, message="no"), f"Access to {REPO} is forbidden", False),
        (Fault("status", code=403, message="Access to this resource is disabled."), "has been disabled", False),
        (Fault("status", code=418), "refused the request", False),
        (Fault("status", code=429), "limits the rate", True),
        (Fault("status", code=503), "server error 503", True),
        (Fault("garbage"), "does not answer like a model hub", False),
    ],
)
def test_refusals_of_the_server(
    hub: Hub, server: HubServer, root: Path, fault: Fault, message: str, unreachable: bool
) -> None:
    serve(root)
    server.fault(REPO, "", fault)
    error = failure(hub)
    assert message in error.message
    assert isinstance(error, HubUnreachable) is unreachable


def test_a_server_that_never_answers(hub: Hub, server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(root)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
    server.fault(REPO, "", Fault("silent"))
    assert "did not answer in time" in failure(hub).message


def test_a_hub_that_is_not_there(hub: Hub) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        error = failure(Hub(f"http://127.0.0.1:{held.getsockname()[1]}", hub.cache_dir))
    assert "cannot be reached" in error.message
    error = failure(Hub("http://no-such-host.invalid", hub.cache_dir))
    assert "cannot be reached" in error.message and "network" in error.hint


@pytest.mark.parametrize("endpoint", ["no-scheme.example", "ftp://hub.example", "http://[::1", "http://a b"])
def test_an_endpoint_that_is_no_address(hub: Hub, endpoint: str) -> None:
    error = failure(Hub(endpoint, hub.cache_dir))
    assert isinstance(error, HubError)
    assert endpoint in error.message and "HF_ENDPOINT" in error.hint


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: OSError(errno.ENOSPC, "No space left on device"), CacheError, "is full"),
        (lambda: OSError(errno.EDQUOT, "Disk quota exceeded"), CacheError, "is full"),
        (lambda: PermissionError(errno.EACCES, "Permission denied", "/cache/x"), CacheError, "/cache/x: Permission"),
        (lambda: OSError(errno.EROFS, "Read-only file system", "/cache/x"), CacheError, "/cache/x: Read-only"),
        (lambda: OSError(errno.EIO, "Input/output error"), CacheError, "/cache: Input/output error"),
        (lambda: httpx.ProxyError("refused"), HubUnreachable, "proxy"),
        (lambda: httpx.ConnectTimeout("late"), HubUnreachable, "did not answer in time"),
        (lambda: httpx.ReadError("reset"), HubUnreachable, "broke"),
        (lambda: httpx.RemoteProtocolError("closed"), HubUnreachable, "broke"),
        (lambda: httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]"), HubUnreachable, "certificate"),
    ],
)
def test_failures_that_cannot_be_provoked_here(make: Callable[[], Exception], kind: type, message: str) -> None:
    """The very exceptions that the operating system and the HTTP library raise, given to the mapping."""
    error = translate(make(), SUBJECT)
    assert error is not None and isinstance(error, kind)
    assert message in error.message and error.hint


def test_an_untrusted_certificate_keeps_its_cause() -> None:
    wrapped = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    wrapped.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed")
    with pytest.raises(HubUnreachable, match="certificate") as caught, map_errors(SUBJECT):
        raise wrapped
    assert caught.value.__cause__ is wrapped


def test_faults_of_the_program_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), map_errors(SUBJECT):
        raise ZeroDivisionError
    assert translate(ZeroDivisionError(), SUBJECT) is None
