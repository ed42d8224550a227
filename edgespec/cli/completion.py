"""`edgespec completion`: shell completion scripts."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL: bash, zsh or fish."""
    from click.shell_completion import get_completion_class

    from edgespec.cli.main import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "edgespec", "_EDGESPEC_COMPLETE").source())
