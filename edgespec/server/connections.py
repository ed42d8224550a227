"""HttpServer: uvicorn's server, which ends the requests in progress when it stops."""

from __future__ import annotations

import socket

import uvicorn


class HttpServer(uvicorn.Server):
    """Serves until Ctrl-C or SIGTERM. Then every request is cancelled; the application answers it with an error."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)
