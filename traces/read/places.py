"""GPU work of tools that write no categories (rocprof, XLA): processes that are GPUs, threads that are streams."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from traces.read.events import Reading
from traces.read.rows import Rows
from traces.read.schema import Args, Event, Loose
from traces.read.tables import take_work

GPU = re.compile(r"(?:/device:GPU:|GPU ?)(\d+)\b", re.IGNORECASE)
TPU = re.compile(r"/device:TPU")
STREAM = re.compile(r"stream[ #:]*(\d+)", re.IGNORECASE)
OTHERS = "memcpy", "memset"


@dataclass(slots=True)
class Places:
    """Devices by process, streams by process and thread, as the metadata events of a file name them.

    rocprof: a process "GPU0", a thread a queue. XLA: a process "/device:GPU:0" whose threads are streams ("Stream
    #13(Compute)") and the same time once more by operation, module and step.
    """

    devices: dict[Loose, int] = field(default_factory=dict)
    streams: dict[tuple[Loose, Loose], int] = field(default_factory=dict)
    streamed: set[Loose] = field(default_factory=set)
    tpu: bool = False

    def learn(self, event: Event) -> None:
        """Take the name of a process or thread."""
        label = event.args.label if isinstance(event.args, Args) else None
        if not isinstance(label, str):
            return
        if event.name == "process_name":
            self.tpu = self.tpu or TPU.search(label) is not None
            if (found := GPU.match(label)) is not None:
                self.devices[event.pid] = int(found.group(1))
        elif event.name == "thread_name" and (found := STREAM.match(label)) is not None:
            self.streams[event.pid, event.tid] = int(found.group(1))
            self.streamed.add(event.pid)

    def take(self, events: list[Event], rows: Rows, reading: Reading) -> None:
        """Those of ``events`` that ran on a GPU."""
        found: dict[str, list[Event]] = {kind: [] for kind in ("kernel", *OTHERS)}
        for event in events:
            device = self.devices.get(event.pid)
            stream = self.streams.get((event.pid, event.tid)) if event.pid in self.streamed else event.tid
            if device is None or stream is None:
                continue
            args = event.args if isinstance(event.args, Args) else Args()
            args.device, args.stream, args.external_id = device, stream, None
            args.correlation = args.correlation_id
            event.args = args
            name = str(event.name).lower()
            found[next((kind for kind in OTHERS if name.startswith(kind)), "kernel")].append(event)
        for kind, some in found.items():
            if some:
                take_work(some, kind, rows, reading)
