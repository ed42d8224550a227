"""Downloads by the real client from a real local server: resume, damage, splits, revisions, headers by range."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep

import pytest

from edgespec.errors import HubError, InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from edgespec.models.download import ATTEMPTS
from edgespec.models.hub import Hub
from edgespec.models.references import HubFile, HubQuant
from edgespec.progress import Quiet, reporting
from tests.models.hubserver import HubServer
from tests.models.hubstate import Fault, commit_of
from tests.models.serving import FETCH, FILE, REPO, environment, serve


class Steps(Quiet):
    """Calls `step` at each step of a download."""

    def __init__(self, step: Callable[[str, int, int], None]) -> None:
        self.download = step  # type: ignore[method-assign]


def test_a_file_arrives_whole_and_in_the_clients_own_layout(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=2**21)
    seen: list[tuple[str, int, int]] = []
    model = hub.resolve(HubFile(REPO, FILE))
    with reporting(Steps(lambda *step: seen.append(step))):
        path = hub.fetch(model)
    assert path.read_bytes() == source.read_bytes()
    assert (model.revision, model.commit, model.size) == ("main", commit_of(REPO), source.stat().st_size)
    assert seen[0] == (FILE, 0, model.size) and seen[-1] == (FILE, model.size, model.size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)

    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    assert try_to_load_from_cache(REPO, FILE, cache_dir=hub.cache_dir) == str(path)
    report = scan_cache_dir(hub.cache_dir)
    assert not report.warnings
    assert {each.repo_id for each in report.repos} == {REPO}
    before = len(server.log)
    hub.fetch(model)
    assert len(server.log) == before, "a second fetch transfers nothing"


def test_a_file_the_client_fetched_itself_is_reused(hub: Hub, server: HubServer, root: Path) -> None:
    from huggingface_hub import hf_hub_download

    serve(root)
    theirs = hf_hub_download(REPO, FILE, cache_dir=hub.cache_dir, endpoint=hub.endpoint)
    downloads = len(server.downloads(FILE))
    assert str(hub.fetch(hub.resolve(HubFile(REPO, FILE)))) == theirs
    assert len(server.downloads(FILE)) == downloads


def test_a_killed_download_resumes_with_only_the_missing_bytes(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=8 * 2**20)
    size, stop = source.stat().st_size, 5 * 2**20
    server.fault(REPO, FILE, Fault("stall", at=stop))
    reference = HubFile(REPO, FILE)
    child = subprocess.Popen([sys.executable, "-c", FETCH, str(reference)], env=environment(hub))
    assert server.state.stalled.wait(30)
    partial = _wait_for_partial(hub, stop - 2**20, child)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    kept = partial.stat().st_size
    assert 0 < kept <= stop

    server.fault(REPO, FILE, None)
    server.state.released.set()
    assert hub.fetch(hub.resolve(reference)).read_bytes() == source.read_bytes()
    last = server.downloads(FILE)[-1]
    assert last.range == f"bytes={kept}-{size - 1}"
    assert (last.status, last.sent) == (206, size - kept)
    assert not partial.exists()


def _wait_for_partial(hub: Hub, size: int, child: subprocess.Popen[bytes]) -> Path:
    """The unfinished file once it has `size` bytes: the server has sent more and now holds the line."""
    while child.poll() is None:
        for found in hub.cache_dir.glob("models--*/blobs/*.incomplete"):
            if found.stat().st_size >= size:
                return found
    raise AssertionError(f"the client ended early with {child.returncode}")


def test_a_dropped_connection_is_taken_up_in_the_same_fetch(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=4 * 2**20)
    server.fault(REPO, FILE, Fault("drop", at=3 * 2**20))
    done: list[int] = []

    def heal(_: str, have: int, __: int) -> None:
        done.append(have)
        if have >= 2**20:
            server.fault(REPO, FILE, None)

    with reporting(Steps(heal)):
        path = hub.fetch(hub.resolve(HubFile(REPO, FILE)))
    assert path.read_bytes() == source.read_bytes()
    assert len(server.downloads(FILE)) == 2


@pytest.mark.parametrize(
    ("code", "after", "seconds"),
    [(429, "0", 0), (503, "2.5", 2.5), (502, "999", 60), (429, "Mon, 01 Jan 2024 00:00:00 GMT", 0), (429, "soon", 1)],
)
def test_a_busy_server_is_asked_again_when_it_says(
    hub: Hub, server: HubServer, root: Path, code: int, after: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("edgespec.models.download.time.sleep", waited.append)
    source = serve(root)
    model = hub.resolve(HubFile(REPO, FILE))
    server.fault(REPO, FILE, Fault("status", code=code, retry_after=after))

    def heal(_: str, __: int, ___: int) -> None:
        if len(server.downloads(FILE)) == 3:
            server.fault(REPO, FILE, None)

    with reporting(Steps(heal)):
        assert hub.fetch(model).read_bytes() == source.read_bytes()
    assert [each.status for each in server.downloads(FILE)] == [code, code, code, 206]
    assert sum(waited) == pytest.approx(3 * seconds) and max(waited, default=0) <= 1
    server.fault(REPO, FILE, Fault("status", code=code, retry_after="0"))
    with reporting(Steps(heal)):
        hub.fetch(model).resolve().unlink()
    with pytest.raises(HubError):  # it gives up
        hub.fetch(model)
    assert len(server.downloads(FILE)) == 4 + ATTEMPTS


def test_a_server_that_ignores_ranges_still_completes_a_partial_file(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=2**21)
    content = source.read_bytes()
    blobs = hub.cache_dir / "models--someone--Model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(content).hexdigest()}.edgespec.incomplete").write_bytes(content[:1_000_001])
    server.fault(REPO, FILE, Fault("no-range"))
    assert hub.fetch(hub.resolve(HubFile(REPO, FILE))).read_bytes() == content


def test_one_corrupt_byte_is_noticed_and_nothing_bad_is_kept(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=2**21)
    server.fault(REPO, FILE, Fault("corrupt", at=2**20 + 77))
    model = hub.resolve(HubFile(REPO, FILE))
    with pytest.raises(InvalidModelFile, match=r"is damaged: its hash is .*the bad copy was removed") as caught:
        hub.fetch(model)
    assert "Pull it again" in caught.value.hint
    assert not [each for each in hub.cache_dir.rglob("blobs/*") if each.is_file()]
    server.fault(REPO, FILE, None)
    assert hub.fetch(model).read_bytes() == source.read_bytes()


def test_damage_in_the_cache_is_found_by_verify_and_healed_by_the_next_fetch(hub: Hub, root: Path) -> None:
    source = serve(root, pad_bytes=2**20)
    model = hub.resolve(HubFile(REPO, FILE))
    path = hub.fetch(model)
    hub.verify(model)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.resolve().write_bytes(content)
    with pytest.raises(InvalidModelFile, match="is damaged"):
        hub.verify(model)
    assert not path.exists()
    assert hub.fetch(model).read_bytes() == source.read_bytes()
    os.truncate(path.resolve(), 1000)
    assert hub.fetch(model).read_bytes() == source.read_bytes(), "a blob cut short is fetched anew"


def test_a_file_that_is_no_model_is_refused_after_the_download(hub: Hub, root: Path) -> None:
    place = root / REPO / FILE
    place.parent.mkdir(parents=True)
    place.write_bytes(b"<html>not here</html>" * 10)
    with pytest.raises(InvalidModelFile, match="not a GGUF file: it starts with '<htm'"):
        hub.fetch(hub.resolve(HubFile(REPO, FILE)))


def test_all_parts_of_a_split_model_are_fetched(hub: Hub, server: HubServer, root: Path) -> None:
    names = [f"Q8_0/big-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    sources = [serve(root, name, pad_bytes=4096 * part) for part, name in enumerate(names, 1)]
    model = hub.resolve(HubQuant(REPO, "q8_0"))
    assert [file.path for file in model.files] == names
    path = hub.fetch(model)
    assert path.name == "big-Q8_0-00001-of-00003.gguf"
    for name, source in zip(names, sources, strict=True):
        assert (path.parents[1] / name).read_bytes() == source.read_bytes()
    joined = hub.header(model)
    assert joined.weight_bytes == sum(read_file(source).weight_bytes for source in sources)
    assert hub.resolve(HubFile(REPO, names[1])).files == model.files
    (root / REPO / names[1]).unlink()
    with pytest.raises(HubError, match=r"without its part Q8_0/big-Q8_0-00002-of-00003\.gguf"):
        hub.resolve(HubQuant(REPO, "Q8_0"))


def test_a_revision_is_pinned(hub: Hub, root: Path) -> None:
    serve(root, pad_bytes=4096)
    old = serve(root, repo=f"{REPO}@v1", pad_bytes=8192)
    model = hub.resolve(HubFile(REPO, FILE, "v1"))
    assert model.commit == commit_of(REPO, "v1")
    path = hub.fetch(model)
    assert path.read_bytes() == old.read_bytes()
    assert hub.fetch(hub.resolve(HubFile(REPO, FILE))) != path
    assert hub.resolve(HubFile(REPO, FILE, model.commit)).commit == model.commit
    with pytest.raises(HubError, match="has no revision v2"):
        hub.resolve(HubFile(REPO, FILE, "v2"))


def test_a_header_is_read_by_range_without_the_weights(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=16 * 2**20)
    header = hub.header(hub.resolve(HubFile(REPO, FILE)))
    assert header.metadata.keys() == read_file(source).metadata.keys()
    requests = server.downloads(FILE)
    assert requests and all(each.range for each in requests)
    assert sum(each.sent for each in requests) <= 2**19
    assert not hub.cache_dir.exists()


def test_the_token_does_not_follow_a_redirect_to_another_host(
    hub: Hub, server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = serve(root, pad_bytes=2**20)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    server.fault(REPO, FILE, Fault("redirect"))
    model = hub.resolve(HubFile(REPO, FILE))
    assert hub.header(model).tensors == read_file(source).tensors
    assert hub.fetch(model).read_bytes() == source.read_bytes()
    requests = server.downloads(FILE)
    assert [each.status for each in requests] == [302, 206, 302, 206]
    assert [each.authorization for each in requests] == ["Bearer hf_right", None, "Bearer hf_right", None]
    assert all(each.range for each in requests)


def test_two_processes_that_pull_the_same_file_transfer_it_once(hub: Hub, server: HubServer, root: Path) -> None:
    source = serve(root, pad_bytes=2**22)
    command = [sys.executable, "-c", FETCH, str(HubFile(REPO, FILE))]
    with subprocess.Popen(command, env=environment(hub), stdout=subprocess.PIPE, text=True) as other:
        while not server.log and other.poll() is None:  # it asks the hub, too
            sleep(0.01)
        path = hub.fetch(hub.resolve(HubFile(REPO, FILE)))
        assert other.communicate(timeout=60)[0].strip() == str(path) and other.returncode == 0
    assert path.read_bytes() == source.read_bytes()
    assert sum(each.sent for each in server.downloads(FILE)) == source.stat().st_size
