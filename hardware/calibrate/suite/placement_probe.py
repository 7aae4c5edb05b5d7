"""One rank's place for :mod:`hardware.calibrate.suite.placement`: holding blocks, parked collectives, rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware.calibrate.suite.timing import Bench
from hardware.calibrate.suite.worker import append
from hardware.errors import HardwareError

CTAS: tuple[int | None, ...] = (1, 2, 4, 8, 16, 32, None)
WORLD = 2
# Dynamic shared memory of a holding block: no second block fits beside it on an SM of 227 KiB.
HOLD_SHARED_BYTES = 200 * 1024


@dataclass(slots=True, kw_only=True)
class Probe:
    """Bench, library of the holding kernel, streams, and the 4 MiB buffers of collectives."""

    bench: Bench
    library: Any
    out: Path
    side: Any
    high: Any  # of higher priority, as the collectives' streams are
    full: Any
    part: Any

    @property
    def measures(self) -> bool:
        """Rank 1 measures, rank 0 is the partner that comes late."""
        return self.bench.comm.rank == 1

    def say(self, kind: str, **fields: object) -> None:
        """Append one row."""
        if self.measures:
            append(self.out, {"kind": kind, "gpu": self.bench.gpu_id, "world": WORLD, **fields})

    def meet(self) -> None:
        """Wait on the host for the other rank."""
        self.bench.comm.share(0.0)

    def room(self, blocks: int) -> Any:
        """Where holding blocks write (SM, begin ns, end ns), [blocks, 3]."""
        torch = self.bench.torch
        out = torch.zeros(blocks, 3, dtype=torch.int64, device=self.bench.device)
        torch.cuda.current_stream().synchronize()
        return out

    def hold(self, stream: Any, room: Any, cluster: int, spin_ns: int) -> None:
        """Launch as many holding blocks as ``room`` has rows for."""
        blocks = room.shape[0]
        error = self.library.hold_launch(
            stream.cuda_stream, blocks, cluster, spin_ns, room.data_ptr(), HOLD_SHARED_BYTES
        )
        if error:
            raise HardwareError(f"holding {blocks} blocks in clusters of {cluster}: CUDA error {error}")

    def collective(self, op: str, ctas: int | None) -> None:
        """4 MiB, on the current stream."""
        part = self.full.new_empty(self.full.shape) if op == "sendrecv_ring" else self.part
        self.bench.comm.collective(op, self.full, part, ctas)

    def parked(self, op: str, ctas: int | None, body: Callable[[], None]) -> None:
        """On rank 1, ``body`` runs while a collective sits there waiting for rank 0."""
        self.meet()
        if self.measures:
            with self.bench.torch.cuda.stream(self.high):
                self.collective(op, ctas)
            time.sleep(0.002)
            body()
        self.meet()
        if not self.measures:
            self.collective(op, ctas)
        self.bench.synchronize()
