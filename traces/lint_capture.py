"""What Holistic Trace Analysis (0.5) and the TensorBoard plugin (0.4) would misread of a capture, counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from traces.capture import NONE, Capture, Finding
from traces.classify import COMMUNICATION, Classes
from traces.read.events import Reading
from traces.read.stream import open_trace

HTA_LAUNCHES = re.compile(r"(?:cuda|hip)(?:LaunchKernel(?:ExC)?|Memcpy\w*|Memset\w*)$")
HTA_RANK = re.compile(rb'"rank":\s+\d+')
HEAD_BYTES = 1 << 20


def lint_capture(capture: Capture, classes: Classes) -> list[Finding]:
    """Findings about the kernels as other tools would count them."""
    work = capture.work
    kernels = capture.kernels
    found: list[Finding] = []

    def note(rule: str, rows: Sequence[int], remedy: str) -> None:
        if len(rows):
            name = capture.names[work.name[rows[0]]]
            found.append(Finding(rule=rule, count=len(rows), first=f"kernel '{name[:80]}'", remedy=remedy))

    collectives = kernels[classes.is_class(COMMUNICATION)[kernels]]
    unseen = [row for row in collectives.tolist() if not capture.names[work.name[row]].startswith("nccl")]
    note("hta-communication-unseen", unseen, "HTA takes only kernels named nccl... for communication")
    launched = kernels[work.launch[kernels] != NONE]
    seen = {i: HTA_LAUNCHES.match(name) is not None for i, name in enumerate(capture.names)}
    other = [row for row in launched.tolist() if not seen[int(capture.calls.name[work.launch[row]])]]
    note("hta-launch-unseen", other, "HTA pairs kernels with cudaLaunchKernel alone: no queue length for these")
    if len(capture.sources) == 1 and len(capture.ranks) > 1:
        first = capture.ranks[0]
        merged = np.flatnonzero(work.rank != first).tolist()
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
