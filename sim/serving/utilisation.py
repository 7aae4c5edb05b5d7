"""MFU and MBU of a served run: what its tokens asked of the GPUs, over what these could have done in the time.

FLOPs and HBM bytes are those of the kernels that steps are made of, at the rows that each stretch of steps had and the
contexts that each request had. What a draft model or layer does is counted; of what a preempted prompt computes again
products are, its attention is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from sim.build.cost import flops_of
from sim.run.plan import classifier
from sim.serving.buckets import bracketing_sizes
from sim.serving.price import StepPrices
from workloads.program import Program

TOGETHER = 64  # sequences that decode together: fewer would find their caches in L2


@dataclass(frozen=True, slots=True)
class KernelSums:
    """FLOPs and HBM bytes of all ranks."""

    flops: float = 0.0
    hbm_bytes: float = 0.0

    def plus(self, other: KernelSums, times: float = 1.0) -> KernelSums:
        """The sum with so many ``times`` the ``other``."""
        return KernelSums(self.flops + times * other.flops, self.hbm_bytes + times * other.hbm_bytes)


@dataclass(kw_only=True, eq=False)
class StepWork:
    """What parts of steps that ``prices`` price compute and read; each is worked out once."""

    prices: StepPrices
    _known: dict[tuple[str, int, int], KernelSums] = field(default_factory=dict)

    def part(self, part: Literal["shared", "head", "decode", "chunk"], rows: int, context: int = 0) -> KernelSums:
        """Of one part over ``rows``: rows of products, sequences that decode, or tokens of a prompt."""
        key = (part, rows, context)
        if key not in self._known:
            self._known[key] = self._of(self.prices.programs.part(part, rows, context))
        return self._known[key]

    def _of(self, program: Program) -> KernelSums:
        classify = classifier(self.prices.machine, eager=False)
        whole = KernelSums()
        for rank in program.ranks:
            for phase in rank.phases:
                for segment in phase.segments:
                    for priced in map(classify, segment.kernels):
                        one = KernelSums(flops_of(priced), priced.terms.hbm_bytes)
                        whole = whole.plus(one, segment.repeat)
        return whole

    def rows(self, part: Literal["shared", "head"], rows: pd.Series[int], steps: pd.Series[int]) -> KernelSums:
        """Products, norms and exchanges, or the head, of so many ``steps`` of so many ``rows`` each."""
        whole = KernelSums()
        for size, count in steps.groupby(rows).sum().items():
            if not (number := int(str(size))):
                continue
            low, high = bracketing_sizes(number)
            share = (number - low) / (high - low) if high > low else 0.0
            whole = whole.plus(self.part(part, low), count * (1.0 - share))
            if share:
                whole = whole.plus(self.part(part, high), count * share)
        return whole

    def decoding(self, sequences: float, cached: float) -> KernelSums:
        """Attention of ``sequences`` steps of one sequence that see ``cached`` tokens in all: linear in both."""
        if not sequences:
            return KernelSums()
        mean = max(1, round(cached / sequences))
        return KernelSums().plus(self.part("decode", TOGETHER, mean), sequences / TOGETHER)

    def prompts(self, tokens: Sequence[int]) -> KernelSums:
        """Attention of prompts of so many ``tokens``: a token's is linear in them, between powers of two as well."""
        sizes = np.array(tokens, dtype=float)
        if not sizes.size:
            return KernelSums()
        top = int(2 ** np.ceil(np.log2(max(sizes.max(), 2.0))))
        grid = [2**power for power in range(top.bit_length())]
        each = [self.part("chunk", size) for size in grid]

        def summed(values: Sequence[float]) -> float:
            of_token = np.array(values) / np.array(grid)
            return float((np.interp(sizes, grid, of_token) * sizes).sum())

        return KernelSums(summed([one.flops for one in each]), summed([one.hbm_bytes for one in each]))


def own_rows(prices: StepPrices, decoding: pd.Series[int], prompts: pd.Series[int]) -> pd.Series[int]:
    """Rows of products of one rank, where ranks of a context group share those of prompts, or all."""
    layout, parting = prices.programs.layout, prices.programs.parting
    if parting > 1:
        return decoding - (-prompts // parting)
    return -(-(decoding + prompts) // layout.cp)


def served_work(
    prices: Sequence[StepPrices], stretches: pd.DataFrame, requests: pd.DataFrame, steps_a_token: float
) -> KernelSums:
    """All FLOPs and HBM bytes of a run whose stages are priced by ``prices``.

    ``stretches`` and ``requests`` are the tables of the run; ``steps_a_token`` is below 1 where drafted tokens pass.
    """
    read, known = requests["input_tokens"].tolist(), requests["hit_tokens"].tolist()
    later = (requests["output_tokens"] - 1).to_numpy(dtype=float)
    steps = later.sum() * steps_a_token
    context = requests["input_tokens"].to_numpy(dtype=float) + later / 2
    seen = float((later * context).sum()) * steps_a_token
    whole = KernelSums()
    for number, own in enumerate(prices):
        table = stretches[stretches["steps"] > 0]
        if len(prices) > 1:
            table = table[table["stage"] == number]
        passes = [(own, own.each, 1)] if own.draft is None else [(own, own.each, 1), (own.draft, 1, own.each - 1)]
        for priced, each, times in passes:
            work = StepWork(prices=priced)
            rows = own_rows(priced, table["decoding"] * each, table["prompt_tokens"] // times)
            passed = table["steps"] * times
            whole = whole.plus(work.rows("shared", rows, passed))
            whole = (
                whole.plus(work.decoding(steps * times, seen * times))
                .plus(work.prompts(read))
                .plus(work.prompts(known), -1.0)
            )
            if priced.programs.scores:
                ending = (table["prompt_tokens"] > 0).astype(int)  # of a prompt, one row at most
                whole = whole.plus(work.rows("head", table["decoding"] * each + ending, passed))
    return whole
