"""Which communication kernels of several ranks are one collective, and who waited for whom."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from traces.capture import NONE, Capture
from traces.classify import COMMUNICATION, Classes
from traces.records import Ints


def match_collectives(capture: Capture, classes: Classes) -> Ints:
    """For each row of work, the number of its collective over ranks, or -1.

    Ranks run the collectives of one group in the same order (NCCL requires it): the n-th of a group and
    operation on one rank is the n-th on the others. Where ranks disagree on how many there were (a window cut
    them), the last ones are matched, which all ranks saw end.
    """
    work = capture.work
    rows = np.flatnonzero(classes.is_class(COMMUNICATION))
    queues: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.tolist():  # work is ordered by rank and start
        message = capture.collectives[work.collective[row]] if work.collective[row] != NONE else None
        group = f"{message.group} {message.ranks}" if message else ""
        both = message is not None and message.operation == "send"  # a send and its receive, under names of their own
        queues[group, "send" if both else capture.names[work.name[row]]][int(work.rank[row])].append(row)
    number = np.full(len(work), NONE, dtype=np.int64)
    count = 0
    for by_rank in queues.values():
        if len(by_rank) < 2:
            continue
        common = min(len(mine) for mine in by_rank.values())
        for members in zip(*(mine[len(mine) - common :] for mine in by_rank.values()), strict=True):
            number[list(members)] = count
            count += 1
    return number


def waiting_ns(capture: Capture, collective: Ints) -> Ints:
    """How long each row waited inside its collective for the last rank to arrive (0 outside collectives)."""
    work = capture.work
    waited = np.zeros(len(work), dtype=np.int64)
    rows = np.flatnonzero(collective != NONE)
    if not len(rows):
        return waited
    last_ns = np.full(int(collective.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last_ns, collective[rows], work.start_ns[rows])
    waited[rows] = np.clip(last_ns[collective[rows]] - work.start_ns[rows], 0, work.dur_ns[rows])
    return waited
