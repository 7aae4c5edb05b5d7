"""What Holistic Trace Analysis (0.5) and the TensorBoard plugin (0.4) would misread of a capture, counted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from traces.capture import NONE, Capture, Finding
from traces.classify import COMMUNICATION, Classes
from traces.read.events import Reading
from traces.read.stream import open_trace
from traces.records import Ints

HTA_LAUNCHES = re.compile(r"(?:cuda|hip)(?:LaunchKernel(?:ExC)?|Memcpy\w*|Memset\w*)$")
HTA_RANK = re.compile(rb'"rank":\s+\d+')
HEAD_BYTES = 1 << 20


def lint_capture(capture: Capture, classes: Classes) -> list[Finding]:
    """Findings about the kernels as other tools would count them."""
    work = capture.work
    kernels = capture.kernels
    found: list[Finding] = []

    def note(rule: str, rows: Ints, remedy: str) -> None:
        if len(rows):
            name = capture.names[work.name[rows[0]]]
            found.append(Finding(rule=rule, count=len(rows), first=f"kernel '{name[:80]}'", remedy=remedy))

    collectives = kernels[classes.is_class(COMMUNICATION)[kernels]]
    seen = np.array([name.startswith("nccl") for name in capture.names])
    note(
        "hta-communication-unseen",
        collectives[~seen[work.name[collectives]]],
        "HTA takes only kernels named nccl... for communication",
    )
    launched = kernels[work.launch[kernels] != NONE]
    paired = np.array([HTA_LAUNCHES.match(name) is not None for name in capture.names])
    other = launched[~paired[capture.calls.name[work.launch[launched]]]] if len(launched) else launched
    note("hta-launch-unseen", other, "HTA pairs kernels with cudaLaunchKernel alone: no queue length for these")
    if len(capture.sources) == 1 and len(capture.ranks) > 1:
        first = capture.ranks[0]
        merged = np.flatnonzero(work.rank != first)
        note("hta-devices-merged", merged, "HTA merges the GPUs of one file by stream: write one file a rank")
    return found


def lint_name(path: Path) -> list[Finding]:
    """Findings about the file as others look for it."""
    found = []
    with open_trace(path, Reading(path=path)) as stream:
        head = stream.read(HEAD_BYTES)
    if HTA_RANK.search(head) is None:
        remedy = 'HTA finds "rank": N with a space by regular expression; without it every file is rank 0'
        found.append(Finding(rule="hta-rank-unseen", count=1, first=path.name, remedy=remedy))
    if not path.name.endswith((".pt.trace.json", ".pt.trace.json.gz")):
        remedy = "the TensorBoard plugin lists only files named *.pt.trace.json[.gz]"
        found.append(Finding(rule="tensorboard-name", count=1, first=path.name, remedy=remedy))
    return found
