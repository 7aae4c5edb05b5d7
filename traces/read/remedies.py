"""What each rule that a file breaks means, in one place: what the reader did, and what the user can do."""

from __future__ import annotations

REMEDIES = {
    "array-without-end": "the file was cut: its whole events were read; export again for the rest",
    "bare-value": "a bare N/A or NaN was read as missing",
    "byte-order-mark": "skipped; Perfetto refuses such a file: save it as UTF-8 without BOM",
    "clocks-not-aligned": "a file has no baseTimeNanoseconds: times of its rank do not compare with the others'",
    "compressed-file-damaged": "what could be decompressed was read; copy or export the file again",
    "correlation-missing": "work without a correlation cannot be paired with its launch: its launch time is unknown",
    "field-of-wrong-type": "the event was left out; export again with a current profiler",
    "kernel-without-time": "work with ts 0 and dur 0 was left out (pytorch/kineto#109): profile a longer warm-up",
    "launch-before-window": "work was launched before profiling began: its launch time is unknown",
    "lone-backslash": "escaped; other readers refuse the file",
    "metadata-unreadable": "the metadata was left out, the events were read: look for unescaped text in it",
    "metadata-of-wrong-type": "that key of the metadata was left out: export again with a current profiler",
    "negative-duration": "the event was left out: it ends before it starts",
    "not-an-event": "an item of traceEvents that is no object was left out",
    "rank-repeated": "files of one rank: the later was given the next free rank; write distributedInfo or rankN names",
    "text-after-the-end": "ignored: Perfetto ignores a second JSON text as well",
    "time-as-text": "ts or dur written as text was read as a number",
    "time-far-from-all-others": "the event was left out: weeks away from the others of its file, or as long",
    "time-missing-or-not-finite": "the event was left out: ts and dur must be finite numbers",
    "trailing-comma": "left out; strict readers refuse the file",
    "unescaped-quote": "escaped (pytorch/kineto#1459); other readers refuse the file",
    "value-left-out": "read as missing",
    "work-without-arguments": "stream taken from tid, device from pid: Holistic Trace Analysis drops such kernels",
}
