"""The header Via, by which a server knows a request that it has sent itself to another server.

Of the Via of a caller only servers of edgespec are passed on.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from edgespec.server.http import HttpError
from edgespec.server.record import current_record

_HERE = f"edgespec-{secrets.token_hex(8)}"  # this process
_SERVER = re.compile(r"edgespec-[0-9a-f]{16}")


def check_hops(headers: Mapping[str, str]) -> None:
    """Keep for `format_via` who has passed a request on. Raises HttpError (508) where it was here before."""
    servers = _SERVER.findall(headers.get("via", ""))
    if _HERE in servers:
        raise HttpError(
            508,
            "the request came back to the server that had sent it.",
            hint="Correct the url of this model in the file of --config.",
        )
    current_record().hops = tuple(servers)


def format_via() -> str:
    """The Via header of a request that is sent on behalf of the current one."""
    return ", ".join(f"1.1 {server}" for server in (*current_record().hops, _HERE))
