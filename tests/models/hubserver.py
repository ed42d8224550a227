"""A real HTTP server that speaks the model hub's protocol over a folder, with faults that tests switch on.

Folders: ROOT/user/repo holds the files of `main`, ROOT/user/repo@tag those of another revision. Weights (.gguf,
.safetensors) have a sha256 etag as the hub's large files do, everything else a git blob hash.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.models.hubstate import LARGE, Fault, Request, State, commit_of, etag_of

BLOCK = 64 * 1024


class HubServer:
    """The server in a thread; use as a context manager."""

    def __init__(self, root: Path, *, token: str | None = None) -> None:
        self.state = State(root, token)
        state = self.state

        class Handler(_Handler):
            hub = state

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def log(self) -> list[Request]:
        return self.state.log

    def fault(self, repo: str, path: str, fault: Fault | None) -> None:
        if fault is None:
            self.state.faults.pop((repo, path), None)
        else:
            self.state.faults[repo, path] = fault

    def downloads(self, path: str) -> list[Request]:
        """GET requests for the content of files whose path ends in `path`."""
        return [each for each in self.log if each.method == "GET" and re.search(rf"/resolve/.*{path}$", each.path)]

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.state.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: State
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are kept in State.log, not printed."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        stated = self.headers.get("Authorization")
        if stated and self.hub.token and stated != f"Bearer {self.hub.token}":
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif path == "/api/models":
            self._list(parse_qs(urlsplit(self.path).query))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/(cdn/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[2], match[3], match[4], redirected=match[1] is not None)
        else:
            self._refuse(404, None, "not found")

    def _list(self, query: dict[str, list[str]]) -> None:
        fault = self.hub.faults.get(("models", ""))
        if fault is not None:
            self._refuse(fault.code, fault.error_code, fault.message or "")
            return
        limit = int(query.get("limit", ["1000"])[0])
        found = self.hub.list_repos(query.get("search", [""])[0], query.get("filter", []), limit)
        self._answer(200, json.dumps(found).encode())

    def _info(self, repo: str, revision: str) -> None:
        folder = self._folder(repo, revision, "")
        if folder is None:
            return
        siblings = []
        for place in sorted(folder.rglob("*")):
            if not place.is_file():
                continue
            name = place.relative_to(folder).as_posix()
            fault = self.hub.fault(repo, name)
            size = fault.at if fault and fault.kind == "oversize" else place.stat().st_size
            entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": etag_of(place)}
            if place.suffix in LARGE:
                entry["lfs"] = {"sha256": etag_of(place), "size": size, "pointerSize": 134}
            siblings.append(entry)
        name = folder.name.split("@", 1)[1] if "@" in folder.name else "main"
        body = {"id": repo, "modelId": repo, "sha": commit_of(repo, name), "siblings": siblings, "tags": []}
        self._answer(200, json.dumps(body).encode())

    def _file(self, repo: str, revision: str, path: str, *, redirected: bool) -> None:
        folder = self._folder(repo, revision, path)
        if folder is None:
            return
        name = folder.name.split("@", 1)[1] if "@" in folder.name else "main"
        commit = {"X-Repo-Commit": commit_of(repo, name)}
        place = folder / path
        if not place.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found", commit)
            return
        fault = self.hub.fault(repo, path)
        size, etag = place.stat().st_size, etag_of(place)
        claimed = fault.at if fault and fault.kind == "oversize" else size
        headers = {**commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if place.suffix in LARGE:
            headers |= {"X-Linked-Size": str(claimed), "X-Linked-Etag": f'"{etag}"'}
        if fault and fault.kind == "redirect" and not redirected:
            port = self.headers["Host"].rsplit(":", 1)[1]
            headers["Location"] = f"http://localhost:{port}/cdn/{repo}/resolve/{revision}/{path}"
            self._answer(302, b"", headers=headers)
            return
        stated = self.headers.get("Range")
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", stated or "")
        if self.command == "HEAD":
            self._send(200, headers, claimed, place, 0, 0, None)
        elif span is None or (fault and fault.kind == "no-range"):
            self._send(200, headers, size, place, 0, size, fault)
        else:
            first, last = int(span[1]), min(int(span[2] or size - 1), size - 1)
            if first > last:
                self._refuse(416, None, "range", {"Content-Range": f"bytes */{size}"})
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            self._send(206, headers, last + 1 - first, place, first, last + 1, fault)

    def _folder(self, repo: str, revision: str, path: str) -> Path | None:
        fault = self.hub.fault(repo, path)
        if fault and fault.kind == "silent":
            self.hub.stalled.set()
            self.hub.released.wait(60)
            self.close_connection = True
            return None
        if fault and fault.kind == "status":
            after = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            self._refuse(fault.code, fault.error_code, fault.message or "", after)
            return None
        if fault and fault.kind == "garbage":
            self._answer(200, b"<html>log in to the network</html>", "text/html")
            return None
        if not (self.hub.root / repo).is_dir():
            self._refuse(401, "RepoNotFound", "Repository not found")
            return None
        folder = self.hub.folder(repo, revision)
        if folder is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return folder

    def _send(
        self, status: int, headers: dict[str, str], length: int, place: Path, first: int, end: int, fault: Fault | None
    ) -> None:
        """Answer with bytes `first` to `end` of the file, as `fault` has it."""
        entry = self._note(status)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()
        position = first
        try:
            with open(place, "rb") as file:
                file.seek(first)
                while position < end:
                    block = bytearray(file.read(min(BLOCK, end - position)))
                    if fault and fault.kind == "corrupt" and position <= fault.at < position + len(block):
                        block[fault.at - position] ^= 0xFF
                    broken = fault and fault.kind in ("stall", "drop") and position + len(block) > fault.at
                    if fault and broken:
                        block = block[: max(0, fault.at - position)]
                    position += len(block)
                    entry.sent += len(block)
                    self.wfile.write(block)
                    if fault and broken:
                        self.close_connection = True
                        if fault.kind == "stall":
                            self.hub.stalled.set()
                            self.hub.released.wait(60)
                        break
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _refuse(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        extra = {**(headers or {}), "X-Error-Message": message}
        if code:
            extra["X-Error-Code"] = code
        self._answer(status, json.dumps({"error": message}).encode(), headers=extra)

    def _answer(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self._note(status).sent = len(body) if self.command != "HEAD" else 0
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _note(self, status: int) -> Request:
        path = unquote(urlsplit(self.path).path)
        entry = Request(self.command, path, self.headers.get("Range"), status, 0, self.headers.get("Authorization"))
        self.hub.log.append(entry)
        return entry
