"""A local server with the model hub's protocol for a folder of GGUF files: listing, headers and byte ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK_BYTES = 64 * 1024


@dataclass(slots=True)
class RangeRequest:
    """A GET for the content of `path`; `range` is its Range header, `sent` the bytes of the body that were sent."""

    path: str
    range: str | None
    sent: int = 0


class OutlineHub:
    """Serves ROOT/user/repo/file in a thread; use as a context manager. `requests` grows with each GET of a file."""

    def __init__(self, root: Path) -> None:
        self.requests: list[RangeRequest] = []
        handler = type("Handler", (_Handler,), {"root": root, "requests": self.requests})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> OutlineHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    root: Path
    requests: list[RangeRequest]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self._send_listing(match[1])
        elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)) and self._file(match[1], match[2]):
            self._send_file(match[1], match[2])
        else:
            self._start(404, {}, 0)

    def _file(self, repo: str, path: str) -> bool:
        return (self.root / repo / path).is_file()

    def _send_listing(self, repo: str) -> None:
        files = sorted(file for file in (self.root / repo).rglob("*") if file.is_file())
        siblings = []
        for file in files:
            size = file.stat().st_size
            lfs = {"sha256": _etag(file), "size": size, "pointerSize": 134}
            siblings.append({"rfilename": file.name, "size": size, "blobId": _etag(file), "lfs": lfs})
        body = json.dumps(
            {"id": repo, "modelId": repo, "sha": _commit(repo), "siblings": siblings, "tags": []}
        ).encode()
        self._start(200 if files else 404, {"Content-Type": "application/json"}, len(body))
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, repo: str, path: str) -> None:
        file = self.root / repo / path
        size = file.stat().st_size
        headers = {"X-Repo-Commit": _commit(repo), "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{_etag(file)}"'}
        if self.command == "HEAD":
            self._start(200, headers, size)
            return
        request = RangeRequest(path, self.headers.get("Range"))
        self.requests.append(request)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or "")
        first, last = (int(span[1]), min(int(span[2] or size - 1), size - 1)) if span else (0, size - 1)
        if span:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._start(206 if span else 200, headers, last - first + 1)
        self._send_bytes(file, first, last, request)

    def _send_bytes(self, file: Path, first: int, last: int, request: RangeRequest) -> None:
        """Stops where the client closes the connection."""
        with file.open("rb") as stream:
            stream.seek(first)
            while request.sent <= last - first:
                block = stream.read(min(BLOCK_BYTES, last - first + 1 - request.sent))
                try:
                    self.wfile.write(block)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                    return
                request.sent += len(block)

    def _start(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()


def _commit(repo: str) -> str:
    return hashlib.sha1(repo.encode()).hexdigest()


def _etag(file: Path) -> str:
    """Stands for the hash of the content, which is never read whole."""
    return hashlib.sha256(f"{file.name} {file.stat().st_size}".encode()).hexdigest()
