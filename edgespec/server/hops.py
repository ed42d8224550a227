"""The header Via, by which a server knows a request that it has sent itself to another server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from edgespec.server.http import HttpError
from edgespec.server.record import current_record

_HERE = f"edgespec-{secrets.token_hex(8)}"  # this process


def check_hops(headers: Mapping[str, str]) -> None:
    """Keep the Via header of a request for `format_via`. Raises HttpError (508) where the request was here before."""
    via = headers.get("via", "")
    if _HERE in via:
        raise HttpError(
            508,
            "the request came back to the server that had sent it.",
            hint="Correct the url of this model in the file of --config.",
        )
    current_record().via = via


def format_via() -> str:
    """The Via header of a request that is sent on behalf of the current one."""
    return ", ".join(filter(None, (current_record().via, f"1.1 {_HERE}")))
