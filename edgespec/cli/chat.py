"""`edgespec chat`: a line-by-line conversation with streaming answers and slash commands."""

from __future__ import annotations

import sys
from typing import Any

import click

from edgespec.cli.options import generation_options, open_request, sampling_params


@click.command("chat")
@click.argument("model", required=False, metavar="[REF]")
@generation_options
def chat_command(model: str | None, **given: Any) -> int:
    """Talk to a model: an alias, user/repo:QUANT, hf:user/repo/file.gguf, or a path.

    Without REF the embedded pair answers; it completes Python code. /help lists what you can type.
    """
    from edgespec.cli.conversation import Conversation
    from edgespec.cli.host import Host
    from edgespec.cli.repl import Repl
    from edgespec.registry.schema import SamplingDefaults

    wanted = open_request(model, given)
    sampling_params(given, SamplingDefaults())  # refuse what is wrong before anything is loaded
    host = Host(wanted, verbose=given["verbose"])
    try:
        sampling = sampling_params(given, host.opened.sampling)
        conversation = Conversation(given["system"], sampling, given["max_tokens"], given["seed"], given["stop"])
        return Repl(host, wanted, conversation, interactive=sys.stdin is not None and sys.stdin.isatty()).loop()
    finally:
        host.close()
