"""`edgespec draft serve`: a draft for targets on other machines."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_model
from edgespec.cli.listening import access_rules, draft_listening_options, listen
from edgespec.cli.options import PARALLEL, load_config, load_options
from edgespec.errors import DraftRefused, InvalidRequest

if TYPE_CHECKING:
    from edgespec.planner.plan import LoadConfig
    from edgespec.server.draft_model import ServedDraft


@click.command("serve", short_help="Draft for targets on other machines.")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@click.option("--for", "target", metavar="NAME", help="Serve the draft that the registry pairs with this model.")
@draft_listening_options
@PARALLEL
@load_options
def serve_command(model: str | None, target: str | None, **options: Any) -> int:
    """Serve the draft model REF to targets on other machines, which use it by `--draft http://HOST:PORT`.

    Without REF it is the draft of the model that commands open without a name, if it has one. Each session of a client
    has one of the --parallel caches. A client that finds none goes on without this draft until one is free. Clients
    have the key in EDGESPEC_DRAFT_KEY.
    """
    from edgespec.cli.serve import run_app
    from edgespec.server.draft_app import draft_application
    from edgespec.server.draft_model import DraftModel
    from edgespec.sockets import keep_alive

    if model is not None and target is not None:
        raise InvalidRequest("REF and --for both name a draft.", hint="Give one of them.")
    options |= {"unix": None, "allow_origin": (), "memory": False, "draft": "none"}
    rules = access_rules(options)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # as `edgespec serve`
    with listen(options) as listening:
        for each in listening.sockets:
            keep_alive(each, idle_s=30, interval_s=10, probes=3)  # a client that is gone gives its cache back
        config = load_config(model or target, options)
        draft = DraftModel(lambda: _load(config, is_paired=model is None), options["parallel"])
        urls = ", ".join(url.removesuffix("/v1") for url in listening.urls)
        click.echo(f"Serving the draft {draft.name} at {urls}; press Ctrl-C to stop.")
        return run_app(draft_application(draft, rules), listening, "info")


def _load(config: LoadConfig, *, is_paired: bool) -> ServedDraft:
    """On the thread that computes. `is_paired`: the draft of the model that `config` names. Raises EdgespecError."""
    from dataclasses import replace

    from edgespec.cli.serve import public_name
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.planner.plan import choose_backend
    from edgespec.registry.resolve import find_pard_token, resolve_pair
    from edgespec.server.draft_model import ServedDraft
    from edgespec.service.load import Loader

    loader = Loader(TerminalReporter(), lambda: None)
    name = public_name(config.model or loader.registry.default)
    if is_paired:
        backend = choose_backend(config, loader.registry, loader.hub)
        pair = resolve_pair(config.model, backend, loader.registry, loader.hub)
        if pair.draft is None:
            raise DraftRefused(f"no draft model is paired with {pair.name}.", hint="Name the draft itself.")
        config = replace(config, model=str(pair.draft), backend=backend)
        name = f"{name}-draft"
    loaded = loader.load(replace(config, draft="none", adapted=None))
    token = find_pard_token(loaded.planned.metadata) if loaded.planned is not None else None
    return ServedDraft(name, loaded.engine.target, loaded.engine.close, token)
