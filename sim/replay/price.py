"""What a trace does not hold, by the laws of its GPU: what each kernel computes, at which clock, at how many watts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hardware.cluster import Cluster
from hardware.laws.terms import KernelTerms
from hardware.power import OperatingPoint, steady_point
from sim.build.cost import Pricer
from sim.replay.stated import work_of
from sim.scenario.machine import Machine
from traces.capture import NONE, Capture, CollectiveArgs
from traces.classify import COMMUNICATION, MEMORY, Classes
from traces.records import Floats, Ints
from traces.rounds import TILE
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.work import AttentionWork, CollectiveWork, ElementwiseWork, GemmWork, Work

Toward = Literal["middle", "least", "most"]  # of what a kernel of unknown bound may take
SIZE_LIMIT = 2.0**40
STEPS_PER_OCTAVE = 8  # durations of stand-ins are distinguished to 9 %
REDUCTION = re.compile("split_?k_?reduce", re.IGNORECASE)  # the sum behind a product cut along k
DECODE = re.compile("decode|split_?kv|paged", re.IGNORECASE)  # attention of one token over the cache
DECODE_ROWS = 256  # a step of so few tokens decodes
FEW_ROWS = 64  # a tile of cuBLAS of no more rows is one of a product of few rows, which reads its weights
GROUPED = re.compile("moe|group|expert", re.IGNORECASE)  # products of experts: how many rows each got is not recorded
RANKS = re.compile(r"\[?((?:\s*\d{1,6}\s*,)*\s*\d{1,6}\s*)\]?")  # of a process group, as PyTorch and we write them
BY_LAW = frozenset({"gemm", "attention", "norm", "elementwise", MEMORY, COMMUNICATION})  # classes that have a stand-in
OPERATIONS = (
    ("reduce_?scatter", CollectiveOp.REDUCE_SCATTER),
    ("all_?gather", CollectiveOp.ALL_GATHER),
    ("all_?to_?all|send_?recv|dispatch|combine", CollectiveOp.ALL_TO_ALL),
    ("broadcast", CollectiveOp.BROADCAST),
    ("", CollectiveOp.ALL_REDUCE),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jobs:
    """What rows of work do: ``job`` indexes ``works``, -1 where no kernel runs (copies over PCIe).

    Rows that are ``sized`` have the sizes that the trace records; the others are stand-ins of their class that take as
    long as was measured: a product (of as many rows as the recorded ones), attention of a prefill, or of a decode if
    those rows are few, a copy, a collective of so many bytes.
    What bounds a grouped product without sizes, or a kernel of no known class, nobody knows: such a row is also given
    as a copy (``as_copy``) and as a large product (``as_product``) of its time; both are -1 where the job is sure.
    """

    works: tuple[Work, ...]
    job: Ints
    as_copy: Ints
    as_product: Ints
    sized: NDArray[np.bool_]

    @property
    def by_shape(self) -> int:
        """How many rows have the sizes that the trace records."""
        return int(self.sized.sum())

    @property
    def unsure(self) -> NDArray[np.bool_]:
        """Rows whose bound is unknown."""
        return np.asarray(self.as_copy != NONE)


def jobs_of(capture: Capture, classes: Classes, dur_ns: Ints, target: Machine, clock_hz: float) -> Jobs:
    """The job of each row on the trace's GPU, ``target``, at ``clock_hz`` or what the fast limiter allows."""
    work = capture.work
    rows = [capture.matrices[matrix].m for matrix in work.matrix[work.matrix != NONE].tolist()]
    stand_in = _StandIns(target, clock_hz, rows=round(float(np.median(rows))) if rows else None)
    known: dict[Work, int] = {}
    by_key: dict[tuple[int, ...], tuple[int, int, int]] = {}
    sized = np.zeros(len(work), dtype=np.bool_)
    job = np.full((3, len(work)), NONE, dtype=np.int64)
    steps = np.rint(np.log2(np.maximum(dur_ns, 100)) * STEPS_PER_OCTAVE).astype(np.int64)
    columns = (work.name, classes.index, work.matrix, work.collective, work.blocks, steps, work.stated)
    stated = [work_of(stated) for stated in capture.stated]
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        name, cls, matrix, collective, blocks, step, own = key
        text, label = capture.names[name], classes.labels[cls]
        recorded = matrix != NONE and label == "gemm" and REDUCTION.search(text) is None
        exact = stated[own] if own != NONE else None
        sized[row] = recorded or exact is not None
        if key not in by_key:
            if exact is not None:
                found: Work | None = exact
            elif recorded:
                product = capture.matrices[matrix]
                found = GemmWork(m=product.m, n=product.n, k=product.k)
            elif "HtoD" in text or "DtoH" in text:
                found = None
            elif label == COMMUNICATION:
                args = capture.collectives[collective] if collective != NONE else None
                found = stand_in.collective(text, args, blocks, step)
            else:
                kind = "elementwise" if REDUCTION.search(text) else "decode" if DECODE.search(text) else label
                found = stand_in.of(kind, step, few_rows(text) if kind == "gemm" else 0)
            unknown = label not in BY_LAW or (label == "gemm" and GROUPED.search(text) is not None)
            both = (stand_in.of("copy", step), stand_in.of("product", step))
            twins = both if unknown and not (exact or recorded) and found is not None else (None, None)
            numbers = [NONE if kind is None else known.setdefault(kind, len(known)) for kind in (found, *twins)]
            by_key[key] = numbers[0], numbers[1], numbers[2]
        job[:, row] = by_key[key]
    return Jobs(works=tuple(known), job=job[0], as_copy=job[1], as_product=job[2], sized=sized)


def few_rows(name: str) -> int:
    """Rows of a tile of cuBLAS that is chosen for few of them, as in a decode; 0 of any other product.

    >>> [few_rows(f"nvjet_sm90_tst_{tile}_64x16_4x1_v_bz_TNT") for tile in ("64x32", "320x128")]
    [32, 0]
    """
    tile = TILE.search(name)
    return int(tile[2]) if tile is not None and int(tile[2]) <= FEW_ROWS else 0


class _StandIns:
    """Works of a class that take a given time on one GPU."""

    def __init__(self, target: Machine, clock_hz: float, *, rows: int | None) -> None:
        self.target, self.clock_hz, self.rows = target, clock_hz, rows
        self.of = lru_cache(maxsize=None)(self._of)

    def _of(self, label: str, step: int, few: int = 0) -> Work:
        rows = self.rows or few
        if label == "gemm" and rows:
            return self._sized(step, lambda n: GemmWork(m=rows, n=n, k=n), least=64, power=2)
        if label in ("gemm", "product"):
            return self._sized(step, lambda n: GemmWork(m=n, n=n, k=n), least=64, power=3)
        if label == "decode" or (label == "attention" and self.rows is not None and self.rows <= DECODE_ROWS):
            return self._sized(
                step,
                lambda n: AttentionWork(batch=64, q_len=1, kv_len=n, q_heads=32, kv_heads=8, head_dim=128, causal=True),
                least=64,
            )  # fmt: skip
        if label == "attention":
            return self._sized(
                step,
                lambda n: AttentionWork(batch=1, q_len=n, kv_len=n, q_heads=32, kv_heads=8, head_dim=128, causal=True),
                least=64, power=2,
            )  # fmt: skip
        return self._sized(
            step, lambda n: ElementwiseWork(op=Elementwise.COPY, rows=n, width=4096, bytes_moved=n * 16384), least=1
        )

    def collective(self, name: str, args: CollectiveArgs | None, blocks: int, step: int) -> Work:
        """By recorded size where there is one, else by time; of as many blocks as the library would take, it chose."""
        spelt = f"{args.operation if args is not None else ''} {name}"
        op = next(op for pattern, op in OPERATIONS if re.search(pattern, spelt, re.IGNORECASE))
        ranks = self._ranks(args)
        ctas = blocks if blocks > 0 else None

        def sized(size: int) -> CollectiveWork:
            chosen = CollectiveWork(op=op, ranks=ranks, buffer_bytes=size)
            if ctas is None or terms_of(chosen, self.target).blocks == ctas:
                return chosen
            return replace(chosen, ctas=ctas)

        if args is not None and max(args.elements_in, args.elements_out) > 0:
            return sized(max(args.elements_in, args.elements_out) * _bytes_of(args.dtype))
        return self._sized(step, sized, least=256)

    def _ranks(self, args: CollectiveArgs | None) -> tuple[int, ...]:
        """The ranks that meet: those that are recorded, or the first of as many as there are."""
        world = max(2, args.group_size if args is not None and args.group_size > 0 else self.target.world)
        named = RANKS.fullmatch(args.ranks.strip()) if args is not None else None
        ranks = tuple(dict.fromkeys(map(int, named[1].split(",")))) if named is not None else ()
        return ranks if len(ranks) == world else tuple(range(world))

    def _sized(self, step: int, make: Callable[[int], Work], *, least: int, power: int = 1) -> Work:
        """The size whose time at the trace's clock is 2**(step / STEPS_PER_OCTAVE) nanoseconds (bisection)."""
        wanted_s = 2.0 ** (step / STEPS_PER_OCTAVE) * 1e-9
        low, high = 0.0, math.log2(SIZE_LIMIT) / power
        while high - low > 0.02:
            middle = 0.5 * (low + high)
            made = make(max(least, round(2.0**middle)))
            at = point_of(terms_of(made, self.target), self.target, self.clock_hz)
            low, high = (middle, high) if at.latency_s < wanted_s else (low, middle)
        return make(max(least, round(2.0**low)))


def _bytes_of(dtype: str) -> int:
    small = {"byte": 1, "char": 1, "float8": 1, "half": 2, "bfloat16": 2, "short": 2, "long": 8, "double": 8}
    return next((size for name, size in small.items() if dtype.lower().startswith(name)), 4)


def terms_of(work: Work, target: Machine) -> KernelTerms:
    """Terms as inside a step, one GPU's own; of a collective on the links of ``target``, if it has its ranks."""
    there = isinstance(work, CollectiveWork) and max(work.ranks) < target.cluster.gpus
    return pricer_of(target, target.cluster if there else None).terms(work)


def pricer_of(target: Machine, cluster: Cluster | None = None) -> Pricer:
    """Prices as inside a step, one GPU's own."""
    return Pricer(profile=target.profile, gpu=target.gpu, gap_s=0.0, cluster=cluster)


def point_of(terms: KernelTerms, target: Machine, clock_hz: float) -> OperatingPoint:
    """Clock, time and power of one kernel: at ``clock_hz``, but no higher than the fast limiter allows it."""
    return steady_point(
        terms, target.curve, gpu_sms=target.gpu.sms, limit_w=target.limits.fast_limit_w,
        min_clock_hz=target.model.min_clock_hz, max_clock_hz=clock_hz,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Each row's time by law (s; NaN without a job), watts beyond idle at its clock, waiting for others, and idle.

    ``free_w``: of its GPU while nothing runs. ``beside``: how many times as long it takes while products run beside it.
    ``bounds_s``: times as a copy and as a product of rows whose bound is unknown; NaN of others.
    """

    time_s: Floats
    dynamic_w: Floats
    waiting_w: Floats
    idle_w: Floats
    free_w: Floats
    beside: Floats
    bounds_s: Floats


def priced(jobs: Jobs, target: Machine, clock_hz: Floats | float) -> Priced:
    """``jobs`` on ``target``, each row at its ``clock_hz``, or as low as the fast limiter holds it."""
    highest_hz = target.model.max_clock_hz
    free_w = target.curve.idle_w(highest_hz)
    clocks_hz, which = np.unique(np.broadcast_to(clock_hz, len(jobs.job)), return_inverse=True)
    asked = np.concatenate([jobs.job, jobs.as_copy, jobs.as_product])
    pairs, back = np.unique(np.stack([asked, np.tile(which.reshape(-1), 3)]), axis=1, return_inverse=True)
    table = np.full((pairs.shape[1], 5), (math.nan, 0.0, 0.0, free_w, 1.0))
    priced_terms = [terms_of(work, target) for work in jobs.works]
    for number, (job, clock) in enumerate(pairs.T.tolist()):
        if job == NONE:
            continue
        terms = priced_terms[job]
        at = point_of(terms, target, float(clocks_hz[clock]))
        idle_w = target.curve.idle_w(at.sm_clock_hz)
        table[number] = at.latency_s, at.power_w - idle_w, terms.waiting_power_w, idle_w, terms.beside_slowdown
    found = table[back.reshape(3, -1)]
    time_s, dynamic_w, waiting_w, idle_w, beside = found[0].T
    return Priced(
        time_s=time_s, dynamic_w=dynamic_w, waiting_w=waiting_w, idle_w=idle_w,
        free_w=np.full(len(jobs.job), free_w), beside=beside, bounds_s=found[1:, :, 0],
    )  # fmt: skip


def unpriced(rows: int) -> Priced:
    """Prices of a GPU without laws: no times, no watts, an idle power to be corrected."""
    none, ones = np.zeros(rows), np.ones(rows)
    return Priced(
        time_s=np.full(rows, math.nan), dynamic_w=none, waiting_w=none, idle_w=ones, free_w=ones, beside=ones,
        bounds_s=np.full((2, rows), math.nan),
    )  # fmt: skip


def relative_times(now: Priced, before: Priced, toward: Toward) -> Floats:
    """How many times as long each row takes at prices ``now`` as at those ``before``; 1 where no law tells.

    Of rows whose bound is unknown, the middle (in ratio) of what a copy and a product would take, or the least or most.
    """
    known = np.nan_to_num(now.time_s / before.time_s, nan=1.0)
    bounds = now.bounds_s / before.bounds_s
    match toward:
        case "middle":
            unsure = np.sqrt(bounds.prod(axis=0))
        case "least":
            unsure = bounds.min(axis=0)
        case "most":
            unsure = bounds.max(axis=0)
    return np.where(np.isfinite(unsure), unsure, known)


def launched_of(jobs: Jobs, target: Machine) -> Ints:
    """The tiles in which the library launches each product whose sizes are known, by its law; 0 of all other rows."""
    pricer = pricer_of(target)
    tiles = [
        pricer.launched(work, pricer.terms(work)).blocks if isinstance(work, GemmWork) else 0 for work in jobs.works
    ]
    return np.where(jobs.sized, np.array([*tiles, 0], dtype=np.int64)[jobs.job], 0)


def with_ctas(jobs: Jobs, ctas: int) -> Jobs:
    """The same jobs with ``ctas`` blocks for each collective."""
    works = tuple(replace(work, ctas=ctas) if isinstance(work, CollectiveWork) else work for work in jobs.works)
    return replace(jobs, works=works)
