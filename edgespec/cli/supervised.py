"""The command's entry point: what opens models in its own process runs in a child, whose death is told in a sentence.

Runtimes end their process where an assertion fails, and damaged files can make them crash. Until the child has ended
this module imports next to nothing, since a command waits for it.
"""

from __future__ import annotations

import os
import sys
from signal import SIG_DFL, SIG_IGN, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, getsignal, signal
from time import monotonic, time_ns

_COMMANDS = ("adapt", "bench", "doctor", "draft", "export", "memory", "plan", "run", "tune", "verify")
_ENDED = (SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM)  # by somebody, not by a fault


def main() -> None:
    """Run the command of sys.argv and exit with its code."""
    is_whole = None not in (sys.stdin, sys.stdout, sys.stderr)  # else a descriptor below might be taken for theirs
    if is_whole and "MLX_RANK" not in os.environ and set(sys.argv[1:2]) & set(_COMMANDS):
        try:
            output = _open_output()
        except OSError:  # there is no place for it
            pass
        else:
            sys.exit(_supervise(output))
    from edgespec.cli.main import main as run_here

    run_here()


def _supervise(output: int) -> int:
    """The exit code of a child that runs the command. A signal that ends it by intention ends this process as well."""
    alive, held = os.pipe()  # it ends with this process
    for each in (output, alive):
        os.set_inheritable(each, True)
    start = f"import sys; sys.path[:] = {sys.path!r}; from edgespec.cli.supervised import run_supervised"
    command = [sys.executable, "-c", f"{start}; run_supervised({output}, {alive})", *sys.argv[1:]]
    child = 0

    def pass_on(number: int, _frame: object) -> None:
        if child:
            os.kill(child, number)

    for number in (SIGINT, SIGTERM, SIGHUP):
        if getsignal(number) is not SIG_IGN:  # what is ignored stays so in the child
            signal(number, pass_on)
    child = os.posix_spawn(sys.executable, command, os.environ)
    os.close(alive)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(held)
    if -code in _ENDED:
        signal(-code, SIG_DFL)
        os.kill(os.getpid(), -code)
    return code if code >= 0 else _tell(code, output)


def _open_output() -> int:
    """A file without a name."""
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"edgespec-{os.getpid()}-{time_ns()}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.unlink(path)
    return file


def _tell(code: int, output: int) -> int:
    """Say why the child has died; returns the exit code of an error of a runtime."""
    from edgespec.errors import BackendError
    from edgespec.service.process import explain

    with os.fdopen(output, "rb") as file:
        death = explain(code, file)
        hint = death.hint or "Try another file, or --draft none."
        print(f"error: {death.reason[:1].upper()}{death.reason[1:]}.\nhint: {hint}", file=sys.stderr)
    return BackendError.exit_code


def run_supervised(output: int, alive: int) -> None:
    """Run the command of sys.argv in a child: what is written to descriptor 2 by others than Python goes to `output`.

    `alive` is a pipe that ends with the parent.
    """
    import faulthandler
    import threading

    from edgespec.cli.main import main
    from edgespec.cli.terminal import SAME_PRESS_S

    interrupted_s = -1.0

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted_s  # a terminal sends SIGINT to both processes, and the parent passes its own on
        if monotonic() - interrupted_s > SAME_PRESS_S:
            interrupted_s = monotonic()
            raise KeyboardInterrupt

    def follow() -> None:
        os.read(alive, 1)
        os.kill(os.getpid(), SIGTERM)

    sys.stderr = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace", buffering=1)
    os.dup2(output, 2)
    for each in (output, alive):
        os.set_inheritable(each, False)
    faulthandler.enable(file=2, all_threads=False)
    if getsignal(SIGINT) is not SIG_IGN:
        signal(SIGINT, interrupt)
    threading.Thread(target=follow, name="edgespec-follow", daemon=True).start()
    main()
