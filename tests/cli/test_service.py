"""Units of systemd and launchd, and the file of the container: what they start is the server."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.service import format_systemd
from tests.cli.conftest import Cli
from tests.gguf_models import REPOSITORY

CONTAINERFILE = (REPOSITORY / "Containerfile").read_text()
ARGUMENTS = ("tree", "--backend", "toy", "--port", "0", "--unix", 'a "%h" $HOME')


def containerfile(instruction: str) -> list[str]:
    """The command of an instruction, which ends with a list in JSON."""
    (found,) = re.findall(rf"^{instruction} .*?(\[.*\])$", CONTAINERFILE, re.MULTILINE)
    return [str(each) for each in json.loads(found)]


def test_units_start_the_server(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    extra = {"EDGESPEC_API_KEY": "a secret", "HF_TOKEN": "another secret"}
    unit, plist = (cli("service", kind, *ARGUMENTS, **extra).stdout for kind in ("systemd", "launchd"))
    assert "secret" not in unit + plist
    properties = plistlib.loads(plist.encode())
    command, folder = properties["ProgramArguments"], properties["WorkingDirectory"]
    fields = [line.partition("=")[::2] for line in unit.splitlines()]
    (start,) = [value for name, value in fields if name == "ExecStart"]
    assert shlex.split(start.replace("$$", "$").replace("%%", "%")) == command
    assert ("WorkingDirectory", folder) in fields and Path(folder).samefile(tmp_path)
    variables = dict(value.split("=") for name, value in fields if name == "Environment")
    assert variables == properties["EnvironmentVariables"] and variables["HF_HOME"] == environment["HF_HOME"]
    with subprocess.Popen(
        command, cwd=folder, env={**variables, "HOME": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        port = said.split(":")[2].split("/")[0]
        check = containerfile("HEALTHCHECK")[-1].replace("7437", port)
        healthy = subprocess.run([sys.executable, "-c", check], check=False, timeout=60)
        child.terminate()
    assert said.startswith("Serving tree at http://127.0.0.1:") and said.endswith(
        ', unix:a "%h" $HOME; press Ctrl-C to stop.\n'
    )
    assert healthy.returncode == 0
    assert child.returncode == 0, "which systemd and launchd take for a clean end"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit, runtime = tmp_path / "edgespec.service", tmp_path / "run"
    runtime.mkdir(0o700)
    unit.write_text(format_systemd(["/bin/sh", 'a "b" \\ $c %d\ne'], {"HF_HOME": "/x %h"}, Path("/")))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["systemd", "--api-key", "x"], "A unit is no place for a key"),
        (["launchd", "--ports", "1"], "There is no option --ports. Did you mean --port?"),
        (["systemd", "--port", "x"], "'x' is not a number"),
    ],
)
def test_arguments_are_checked(arguments: list[str], fault: str, cli: Cli) -> None:
    done = cli("service", *arguments)
    assert done.returncode == 2 and fault in done.stderr and not done.stdout


def test_the_container_needs_a_key(cli: Cli) -> None:
    """Its entry point without a key. Whatever it copies exists, and is not kept from the build."""
    program, *arguments = containerfile("ENTRYPOINT")
    done = cli(*arguments)
    assert program == "edgespec" and done.returncode == 2
    assert "other machines could use a server at 0.0.0.0 without a key" in done.stderr.lower()
    copied = [name for line in re.findall(r"^COPY ([^-].*) \S+$", CONTAINERFILE, re.MULTILINE) for name in line.split()]
    kept = (REPOSITORY / ".dockerignore").read_text().split()
    assert "edgespec" in copied and all((REPOSITORY / name).exists() and f"!{name}" in kept for name in copied)
