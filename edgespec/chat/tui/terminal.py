"""The terminal of the chat: what Textual reads of it."""

from __future__ import annotations

import os
import select
from codecs import getincrementaldecoder
from fcntl import ioctl
from struct import unpack
from termios import FIONREAD

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

_WAIT_S = 0.1  # for input, before a lone Escape is taken for a key
_MAX_BYTES = 4096  # of a read


class Terminal(LinuxDriver):
    """Textual's driver, which goes on after a byte that is no UTF-8, as a paste from a Latin-1 terminal has it.

    Textual decodes strictly, and a byte that cannot be decoded ends its thread. Here U+FFFD replaces the byte.
    """

    def run_input_thread(self) -> None:
        parser, decode = XTermParser(self._debug), getincrementaldecoder("utf-8")("replace").decode
        (early,) = unpack("i", ioctl(self.fileno, FIONREAD, bytes(4)))  # bytes from before the screen was there
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], _WAIT_S)[0]:
                data = os.read(self.fileno, early or _MAX_BYTES)
                if not data:
                    return  # the terminal is gone
                if early:
                    data, early = data.replace(b"\n", b"\r"), 0  # as terminals wrote Enter until then
                if text := decode(data):  # an empty text would end the parser
                    for event in parser.feed(text):
                        self.process_message(event)
            for event in parser.tick():
                self.process_message(event)

    def _run_input_thread(self) -> None:
        """Let the app end with an exception of the thread as with one of its own."""
        try:
            self.run_input_thread()
        except Exception as error:  # noqa: BLE001 - the thread of a toolkit has no other place for it
            self._app.call_later(self._app._handle_exception, error)
