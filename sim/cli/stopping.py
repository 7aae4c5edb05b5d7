"""What ends a command from outside."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end: whatever cleans up after Ctrl-C cleans up after it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def stoppable() -> Iterator[list[Stopped]]:
    """In the block, the first SIGTERM or SIGHUP raises :class:`Stopped`; further ones do not disturb the clean-up.

    A signal that the caller ignores (``nohup``) or handles stays as it is. The list holds what was raised: a library
    that is being imported may make an error of its own of it.
    """
    came: list[Stopped] = []
    if threading.current_thread() is not threading.main_thread():  # others cannot take signals
        yield came
        return

    def stop(number: int, _: Any) -> None:
        for signal_number in taken:
            signal.signal(signal_number, signal.SIG_IGN)
        came.append(Stopped(number))
        raise came[0]

    taken = [
        signal_number
        for signal_number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signal_number) is signal.SIG_DFL
    ]
    for signal_number in taken:
        signal.signal(signal_number, stop)
    try:
        yield came
    finally:
        for signal_number in taken:
            signal.signal(signal_number, signal.SIG_DFL)
