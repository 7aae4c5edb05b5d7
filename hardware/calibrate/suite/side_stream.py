"""Work on a second stream of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardware.calibrate.suite.timing import Bench


class SideStream:
    """A second stream beside the current one, with events between them; in a dry run, plain calls."""

    def __init__(self, bench: Bench, *, priority: int = -1) -> None:
        self._torch, self._dry = bench.torch, bench.dry
        self._stream: Any = None if bench.dry else bench.torch.cuda.Stream(priority=priority)

    def fork(self) -> None:
        """The second stream goes on from where the current one is."""
        if not self._dry:
            self._stream.wait_stream(self._torch.cuda.current_stream())

    def join(self) -> None:
        """The current stream waits for everything on the second."""
        if not self._dry:
            self._torch.cuda.current_stream().wait_stream(self._stream)

    def run(self, work: Callable[[], object]) -> Any:
        """Launch ``work`` on the second stream; returns the event after it."""
        if self._dry:
            work()
            return None
        with self._torch.cuda.stream(self._stream):
            work()
            event = self._torch.cuda.Event()
            event.record()
        return event

    def run_after_main(self, work: Callable[[], object]) -> Any:
        """Like :meth:`run`, after everything launched on the current stream so far."""
        self.fork()
        return self.run(work)

    def main_waits(self, event: Any) -> None:
        """The current stream waits for an event of :meth:`run`."""
        if not self._dry:
            self._torch.cuda.current_stream().wait_event(event)
