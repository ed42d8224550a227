"""The command's entry point: what opens models in its own process runs in a child, whose death is told in a sentence.

Runtimes end their process if an assertion fails, and damaged files can make them crash. Until the child has ended
this module imports next to nothing, since a command waits for it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from signal import (
    SIG_DFL,
    SIG_IGN,
    SIGCHLD,
    SIGHUP,
    SIGINT,
    SIGPIPE,
    SIGQUIT,
    SIGTERM,
    default_int_handler,
    getsignal,
    signal,
)
from time import time_ns

_COMMANDS = ("adapt", "bench", "doctor", "draft", "export", "memory", "plan", "run", "tune", "verify", "worker")
_SENT = (SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM)  # by a person or another program
_WHOLE = b"\0the command has ended in Python"  # the end of the output of a child that was not ended by native code


def main() -> None:
    """Run the command of sys.argv and exit with its code."""
    if is_python := getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, SIG_DFL)  # which ends this process without a traceback while modules are imported
    name = sys.argv[1:2]
    is_native = set(name) & set(_COMMANDS) or (name == ["chat"] and "--verbose" in sys.argv)
    is_whole = None not in (sys.stdin, sys.stdout, sys.stderr)  # else a descriptor below might be taken for theirs
    if is_native and is_whole and "MLX_RANK" not in os.environ:
        output = _open_output()
        if output is not None:
            sys.exit(_supervise(output))
    from edgespec.cli.main import main as run_here

    if is_python:
        signal(SIGINT, default_int_handler)
    run_here()


def _supervise(output: int) -> int:
    """The exit code of a child that runs the command. A signal that somebody sends and that ends the child ends this
    process as well.
    """
    alive, held = os.pipe()  # it ends with this process, and each byte is a Ctrl-C
    for each in (output, alive):
        os.set_inheritable(each, True)
    # What isolated.python_command gives; its import takes as long as all of this module.
    start = f"import sys; sys.path[:] = {sys.path!r}; from edgespec.cli.supervised import run_supervised"
    is_deaf = getsignal(SIGINT) is SIG_IGN  # as in the background of a script; an answer can be cancelled all the same
    early_end = "" if is_deaf else "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    command = [sys.executable, "-c", f"{early_end}{start}; run_supervised({output}, {alive}, {is_deaf})", *sys.argv[1:]]
    child = 0
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if number == SIGINT:
            if not _has_terminal():  # which has sent one to the child as well
                with suppress(OSError):
                    os.write(held, b"c")
            return
        if not child:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            os.kill(child, number)

    signal(SIGCHLD, SIG_DFL)  # who starts this may ignore it, and then there would be no exit code
    for number in (SIGINT, SIGTERM, SIGHUP):
        if number == SIGINT or getsignal(number) is not SIG_IGN:  # the child inherits what is ignored
            signal(number, pass_on)
    child = os.posix_spawn(sys.executable, command, os.environ)
    os.close(alive)
    for sent in early:
        pass_on(sent, None)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -code in _SENT:
        signal(-code, SIG_DFL)
        os.kill(os.getpid(), -code)
        return 128 - code  # as process 1 of a container, which signals do not end
    return _tell(code, output)


def _has_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, whose Ctrl-C reaches all of the group."""
    for each in (0, 1, 2):
        try:
            return os.tcgetpgrp(each) == os.getpgrp()
        except OSError:
            continue
    return False


def _open_output() -> int | None:
    """A descriptor of a temporary file that has no name any more; None if no folder takes one."""
    for folder in (os.environ.get("TMPDIR", "/tmp"), "/tmp"):
        path = os.path.join(folder, f"edgespec-{os.getpid()}-{time_ns()}")
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            os.unlink(path)
        except OSError:
            continue
        return file
    return None


def _tell(code: int, output: int) -> int:
    """Say why the child has ended, unless it has said so itself. Returns the exit code of the command."""
    with os.fdopen(output, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_WHOLE)))
        if code == 0 or file.read() == _WHOLE:
            return code
        from edgespec.cli.interrupts import INTERRUPTED
        from edgespec.client.death import explain
        from edgespec.errors import BackendError

        if code in (INTERRUPTED, BackendError.exit_code):  # a second Ctrl-C, and a worker that is gone: they are told
            return code
        death = explain(code, file)
    hint = death.hint or ("Start it again." if sys.argv[1:2] == ["worker"] else "Try another model file.")
    error = BackendError(f"{death.reason[:1].upper()}{death.reason[1:]}.", hint=hint)
    print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


def run_supervised(output: int, alive: int, is_deaf: bool) -> None:
    """Run the command of sys.argv in a child: what is written to descriptor 2 by others than Python goes to `output`.

    `alive` is a pipe that ends with the parent, and has a byte for each SIGINT that the parent gets. `is_deaf` says
    that SIGINT is ignored if nothing can be cancelled.
    """
    import faulthandler
    import threading

    from edgespec.cli.interrupts import PRESSES
    from edgespec.cli.main import main

    def interrupt(number: int, frame: object) -> None:
        if PRESSES.is_new():
            raise KeyboardInterrupt

    def follow() -> None:
        while os.read(alive, 1):
            PRESSES.pass_on()
        os.kill(os.getpid(), SIGTERM)

    sys.stderr = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace", buffering=1)
    os.dup2(output, 2)
    for each in (output, alive):
        os.set_inheritable(each, False)
    faulthandler.enable(file=2, all_threads=False)
    signal(SIGINT, SIG_IGN if is_deaf else interrupt)
    threading.Thread(target=follow, name="edgespec-follow", daemon=True).start()
    try:
        main()
    finally:
        signal(SIGINT, SIG_IGN)  # a late copy would end what has ended
        with suppress(OSError):  # the disk is full
            os.write(output, _WHOLE)
