"""The host that Holistic Trace Analysis wants to see: a thread that launches every kernel, operators around launches.

HTA (0.5) rounds the times of a file to whole microseconds, starts up and ends down, wherever one of them is none: what
is shorter than a microsecond then ends before it begins, and its critical path breaks. So these files hold whole
microseconds: ends are rounded, durations follow, and sums stay what they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from traces.lint import to_ns
from traces.records import Counter, Ints, Trace
from traces.write.text import json_text

HOST_PID = 1_000_000  # the host thread that launches on GPU n is shown as process HOST_PID + n
HOST_THREAD = 1
PS_PER_US = 1_000_000
NUMBER = re.compile(r"\s*\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Launches of one process: kernels (indices of spans) in order, when each is launched, and its operator's name."""

    kernels: Ints
    issued_us: Ints
    operators: list[str]


def in_whole_us(trace: Trace) -> Trace:
    """``trace`` in whole microseconds, late enough that every launch (1 us each, one after another) fits before."""
    spans = trace.spans
    start_us, end_us = _us(spans.start_ps), _us(spans.end_ps)
    rounded = replace(spans, start_ps=start_us * PS_PER_US, end_ps=end_us * PS_PER_US)
    trace = replace(trace, spans=rounded)
    lead_us = max((-int(host.issued_us.min()) for host in hosts_of(trace).values()), default=0)
    shift_ps = max(0, lead_us) * PS_PER_US
    return replace(
        trace,
        spans=replace(rounded, start_ps=rounded.start_ps + shift_ps, end_ps=rounded.end_ps + shift_ps),
        counters=[_moved(counter, shift_ps) for counter in trace.counters],
    )


def _us(time_ps: Ints) -> Ints:
    return (time_ps + PS_PER_US // 2) // PS_PER_US


def _moved(counter: Counter, shift_ps: int) -> Counter:
    return replace(counter, time_ps=_us(counter.time_ps) * PS_PER_US + shift_ps)


def hosts_of(trace: Trace) -> Mapping[int, Host]:
    """The launching thread of every process.

    A kernel is launched as the one before it on its stream starts, so that nothing waits for the host, which is not
    simulated; and no later than the launches behind it allow.
    """
    spans = trace.spans
    kernel = np.array([kind.category == "kernel" for kind in trace.kinds], dtype=bool)[spans.kind]
    layer = np.array([kind.category == "layer" for kind in trace.kinds], dtype=bool)[spans.kind]
    pids = np.array([lane.pid for lane in trace.lanes], dtype=np.int64)[spans.lane]
    start_us = to_ns(spans.start_ps) // 1000
    found = {}
    for pid in np.unique(pids[kernel]).tolist():
        mine = np.flatnonzero(kernel & (pids == pid))
        mine = mine[np.lexsort((start_us[mine], spans.lane[mine]))]
        first = np.append(True, spans.lane[mine][1:] != spans.lane[mine][:-1])
        before = np.where(first, start_us[mine], np.append(0, start_us[mine][:-1]))
        latest = np.minimum(before, start_us[mine] - 1)
        order = np.lexsort((start_us[mine], latest))
        mine, latest = mine[order], latest[order]
        # Each at least 1 us before the next: from the last one back.
        places = np.arange(len(mine))
        issued_us = np.minimum.accumulate((latest - places)[::-1])[::-1] + places
        begins = start_us[mine]
        around = np.flatnonzero(layer & (pids == pid))
        around = around[np.argsort(start_us[around], kind="stable")]
        at = np.searchsorted(start_us[around], begins, side="right") - 1
        names = [NUMBER.sub("", trace.kinds[kind].name) for kind in spans.kind[around].tolist()] or ["step"]
        labels = [f"{max(0, kernel)}" for kernel in at.tolist()]
        operators = [f"{label} {names[max(0, kernel)]}" for label, kernel in zip(labels, at.tolist(), strict=True)]
        found[pid] = Host(kernels=mine, issued_us=issued_us, operators=operators)
    return found


def host_text(trace: Trace) -> Iterator[str]:
    """Events of all launching threads: a call a kernel, and an operator around the calls of each layer."""
    for pid, host in hosts_of(trace).items():
        where = f'"pid":{HOST_PID + pid},"tid":{HOST_THREAD}'
        issued = host.issued_us.tolist()
        edges = [0, *(n for n in range(1, len(issued)) if host.operators[n] != host.operators[n - 1]), len(issued)]
        texts = []
        for first, after in pairwise(edges):
            name = json_text("launch " + host.operators[first].split(" ", 1)[1], "layer")
            dur = issued[after - 1] + 1 - issued[first]
            texts.append(
                f',\n{{"ph":"X","name":{name},"cat":"cpu_op",{where},"ts":{issued[first]},"dur":{dur},"args":{{}}}}'
            )
        for index, at in zip(host.kernels.tolist(), issued, strict=True):
            texts.append(
                f',\n{{"ph":"X","name":"cudaLaunchKernel","cat":"cuda_runtime",{where},"ts":{at},"dur":1,'
                f'"args":{{"correlation":{index + 1}}}}}'
            )
        yield "".join(texts)
