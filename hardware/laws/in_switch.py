"""All-reduces that an NVSwitch adds (NCCL's NVLS): multimem loads add, multimem stores spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hardware.laws.nccl_data import LIBRARIES

# Share of a link's rate at which (1 + 1/n) B cross it, and seconds of a loop (copy in, add, copy out, their flags).
# Both by least squares on NCCL 2.28.9's all-reduces of 4 to 512 MiB on eight H100s (github.com/gabrieldemarmiesse/
# torch-mojo-backend, agents_docs/mojo_collectives_nvls_results.md, 6.1, at 31de5a4754b4: 52.7, 88.4, 118.7, 175.3,
# 323.8, 585.7, 748.7, 1107.6, 2143.4 us for 4, 9, 16, 27, 64, 128, 168, 256, 512 MiB): within 0.8 %. The tables by
# which this law is judged (aiconfigurator-core 0.12.0) were in no fit.
LINK_SHARE, LOOP_S = 0.8145, 6.80e-6
# Loops beside those over the data: the three steps of a loop are a pipeline, which takes two to fill and drain.
FILLED_LOOPS = 2
# NCCL's chunks a channel and rank (bytes), and up to how many loops' bytes it takes each rather than the next (NCCL
# 2.27, src/enqueue.cc, calcCollChunking).
CHUNKS = ((16 * 2**10, 4.0), (32 * 2**10, 16.0), (64 * 2**10, 128.0), (128 * 2**10, math.inf))
# Least ranks of a node for which the library uses it: for fewer its tuner's lines have rings as fast.
IN_SWITCH_FROM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class InSwitch:
    """An NVSwitch that adds: rate of its traffic on a link, seconds of a loop, and the blocks that drive it."""

    bytes_per_s: float
    loop_s: float
    blocks: int


def in_switch_of(architecture: str, link_bytes_per_s: float) -> InSwitch | None:
    """The additions of switches between GPUs of ``architecture``; None before Hopper.

    Seconds of a loop are scaled from a Hopper's by the latency of a step of LL with all threads.

    >>> in_switch_of("hopper", 450e9).blocks, in_switch_of("ampere", 300e9)
    (16, None)
    """
    library, hopper = LIBRARIES.get(architecture), LIBRARIES["hopper"]
    if library is None or not library.added_ctas or not link_bytes_per_s:
        return None
    return InSwitch(
        bytes_per_s=LINK_SHARE * link_bytes_per_s,
        loop_s=LOOP_S * library.low.hop_s("all_reduce") / hopper.low.hop_s("all_reduce"),
        blocks=library.added_ctas,
    )


def in_switch_bytes(world: int, buffer_bytes: float) -> float:
    """Bytes that cross a rank's link each way: all of its buffer for the others to add, and its part of the sum.

    >>> in_switch_bytes(8, 800)
    900.0
    """
    return (1.0 + 1.0 / world) * buffer_bytes


def in_switch_s(adder: InSwitch, world: int, buffer_bytes: float) -> float:
    """All-reduce that the switch adds: loops over a chunk of every block and rank, and two more to fill and drain.

    Where the next larger chunk is quicker from its first size on than this one is here, that time stands: more bytes
    never take less.

    >>> adder = in_switch_of("hopper", 450e9)
    >>> [round(in_switch_s(adder, 8, size * 2**20) * 1e6) for size in (4, 64, 512)]
    [53, 325, 2148]
    """
    first, quickest_s = 0.0, math.inf
    for chunk, most_loops in CHUNKS:
        loop_bytes = float(chunk * adder.blocks * world)
        last = most_loops * loop_bytes
        if buffer_bytes < last:
            size = max(buffer_bytes, first)
            loops = math.ceil(size / loop_bytes) + FILLED_LOOPS
            moved = in_switch_bytes(world, size + FILLED_LOOPS * loop_bytes)
            quickest_s = min(quickest_s, loops * adder.loop_s + moved / adder.bytes_per_s)
        first = last
    return quickest_s
