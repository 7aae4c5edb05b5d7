"""What a sweep is at while a scenario takes long: its workers tell the journal, the progress bar reads it there."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.output.files import OutputError

# A scenario that takes longer is told of, and again each time as long has passed.
TELL_S = 5.0
# The end of the journal in which the newest lines of all workers stand.
TAIL_BYTES = 1 << 16
# Fields by which a reader knows a scenario, where they were given.
NAMED = ("model", "gpu", "tp", "ep", "pp", "batch", "seq_len", "output_len", "overlap_chunks")


@dataclass(slots=True, kw_only=True)
class InWork:
    """The scenario that a worker is at, since when, and what it last said of itself."""

    scenario_id: str = ""
    fields: Mapping[str, Any]
    begun_s: float
    said: str = ""

    def say(self, text: str) -> None:
        """The ``progress`` of :func:`~sim.run.runner.simulate`."""
        self.said = text

    def line(self, now_s: float) -> str:
        """A line of the journal that is no row."""
        words = ", ".join(f"{name} {self.fields[name]}" for name in NAMED if name in self.fields)
        told = {"in_work": self.scenario_id, "words": words, "said": self.said, "begun_s": self.begun_s, "at_s": now_s}
        return json.dumps(told) + "\n"


Begin = Callable[[str, Mapping[str, Any]], InWork]


@contextmanager
def telling(write: Callable[[str], None], tell_s: float = TELL_S) -> Iterator[Begin]:
    """In the block, what was begun last is written every ``tell_s`` seconds once it has taken as long."""
    works: list[InWork] = []
    over = threading.Event()

    def begin(scenario_id: str, fields: Mapping[str, Any]) -> InWork:
        works[:] = [InWork(scenario_id=scenario_id, fields=fields, begun_s=time.time())]
        return works[0]

    def tell() -> None:
        while not over.wait(tell_s):
            now_s = time.time()
            for work in works[:1]:
                if now_s - work.begun_s >= tell_s:
                    with suppress(OutputError):  # the scenario's own row will meet it too
                        write(work.line(now_s))

    thread = threading.Thread(target=tell, daemon=True, name="slow scenarios")
    thread.start()
    try:
        yield begin
    finally:
        over.set()
        thread.join()


def slowest(journal: Path, now_s: float, tell_s: float = TELL_S) -> str:
    """The scenario of ``journal`` that has been in work longest, as a line; empty where none takes long."""
    at: dict[str, dict[str, Any]] = {}
    for line in _tail(journal):
        try:
            told = json.loads(line)
            at.pop(told.get("scenario_id", ""), None)
            if "in_work" in told and now_s - told["at_s"] < 2 * tell_s:
                at[told["in_work"]] = {name: told[name] for name in ("begun_s", "said", "words")}
        except (ValueError, AttributeError, KeyError, TypeError):  # being written, or damaged: the sweep says so
            continue
    if not at:
        return ""
    longest = min(at.values(), key=lambda told: float(told["begun_s"]))
    said = f": {longest['said']}" if longest["said"] else ""
    return f"in work for {now_s - longest['begun_s']:.0f} s: {longest['words']}{said}"


def _tail(journal: Path) -> list[bytes]:
    try:
        with journal.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
            return stream.read().splitlines()
    except OSError:  # not begun yet, or done
        return []
