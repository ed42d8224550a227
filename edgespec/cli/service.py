"""`edgespec service`: units that start the server with the session of a user, for systemd and launchd."""

from __future__ import annotations

import os
import plistlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from edgespec.cli.serve import read_models, serve_command
from edgespec.errors import InvalidRequest

_LABEL = "io.github.edgespec"
_KEPT = re.compile(
    r"EDGESPEC_(?!API_KEY)\w+|XDG_(CACHE|CONFIG|DATA)_HOME|HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT)"
    r"|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
)
_UNIT = """\
[Unit]
Description=edgespec, language models over HTTP
Documentation=https://github.com/edgespec/edgespec/blob/main/docs/server.md
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={folder}
{environment}# May hold EDGESPEC_API_KEY=..., for its owner only (chmod 600).
EnvironmentFile=-%E/edgespec/serve.env
Restart=on-failure
RestartSec=5
# The server ends the processes of its models itself, and goes on if one of them has too little memory.
KillMode=mixed
TimeoutStopSec=20
OOMPolicy=continue
# ProtectSystem= and the like are left out: they need user namespaces, which some systems deny to users. So is
# MemoryDenyWriteExecute=, which drivers of GPUs do not bear.
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""
_STEPS = {
    "systemd": (
        "for ~/.config/systemd/user/edgespec.service; then:",
        "systemctl --user daemon-reload && systemctl --user enable --now edgespec",
        "journalctl --user -u edgespec  shows the log; `loginctl enable-linger` starts it without a login",
    ),
    "launchd": (
        f"for ~/Library/LaunchAgents/{_LABEL}.plist; then:",
        f"launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{_LABEL}.plist",
        "~/Library/Logs/edgespec.log has the log",
    ),
}


@click.command("service", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("manager", metavar="systemd|launchd", type=click.Choice(["systemd", "launchd"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF serve]...")
def service_command(manager: str, arguments: tuple[str, ...]) -> None:
    """Print a unit that runs `edgespec serve` with ARGUMENTS as a service of this user.

    Paths among ARGUMENTS may be relative: the service runs in the present folder. It gets the variables that name the
    folders of models and settings. Keys do not belong into a unit: use --keys FILE.
    """
    context = serve_command.make_context("edgespec serve", list(arguments))
    if context.get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
        raise InvalidRequest("a unit is no place for a key.", hint="Use --keys FILE; `edgespec key add` makes keys.")
    read_models(context.params["models"], context.params)  # raises for one that the service could not serve
    command = [sys.executable, "-P", "-m", "edgespec", "serve", *arguments]
    environment = {name: value for name, value in sorted(os.environ.items()) if _KEPT.fullmatch(name)}
    for line in _STEPS[manager]:
        click.echo(f"# {line}", err=True)
    write = format_systemd if manager == "systemd" else format_launchd
    click.echo(write(command, environment, Path.cwd()), nl=False)


def format_systemd(command: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    variables = "".join(f"Environment={_quote(f'{name}={value}')}\n" for name, value in environment.items())
    words = " ".join(_quote(word).replace("$", "$$") for word in command)
    return _UNIT.format(command=words, environment=variables, folder=str(folder).replace("%", "%%"))


def _quote(word: str) -> str:
    """A word as systemd reads it, in quotes if it is not plain. See "Quoting" in systemd.service(5)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", word) else f'"{escaped}"'


def format_launchd(command: Sequence[str], environment: dict[str, str], folder: Path) -> str:
    """A property list for ~/Library/LaunchAgents. Standard processes of launchd get less of the processor."""
    log = str(Path.home() / "Library" / "Logs" / "edgespec.log")
    properties = {
        "Label": _LABEL,
        "ProgramArguments": list(command),
        "WorkingDirectory": str(folder),
        "EnvironmentVariables": environment,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(properties, sort_keys=False).decode()
