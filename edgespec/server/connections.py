"""HttpServer: uvicorn's server, which ends the requests in progress when it stops."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp


async def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application until Ctrl-C, which raises KeyboardInterrupt, or SIGTERM."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        lifespan="on",
    )
    await HttpServer(config).serve([listener])


class HttpServer(uvicorn.Server):
    """Serves until Ctrl-C or SIGTERM. Then every request is cancelled; the application answers it with an error."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)
