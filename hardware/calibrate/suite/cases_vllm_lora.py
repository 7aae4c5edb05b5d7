"""Products of low-rank adapters as vLLM's Punica kernels do them (``vllm.lora.ops.triton_ops``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.calibrate.suite.case import Case
from hardware.calibrate.suite.timing import Bench

Row = Mapping[str, Any]
# Copies of the adapters, so that those of a launch come from memory: a step reads every layer's once.
_KEPT_BYTES, _MOST_COPIES = 256 << 20, 64


def adapter_case(bench: Bench, row: Row) -> Case:
    """One product of ``tokens`` rows that ask for ``adapters`` in turn, of the ``slots`` that the server holds (if the
    row says none: as many).

    ``up`` false: from an input of ``width`` to ``slices`` sums of ``rank``, cleared first (two kernels). ``up``: from
    them to outputs of ``width`` in all, added to what stands there; ``slices`` are equal, or with three a query's and
    two of a quarter of it (grouped keys and values).
    """
    from vllm.lora.ops.triton_ops import lora_expand, lora_shrink
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    torch, rows, distinct = bench.torch, row["tokens"], row["adapters"]
    slices, rank, width = row["slices"], row["rank"], row["width"]
    slots = max(row.get("slots") or 0, distinct)
    meta = LoRAKernelMeta.make(slots, rows, bench.device)
    meta.prepare_tensors(torch.arange(rows, device=bench.device, dtype=torch.int32) % distinct)
    facts = meta.meta_args(rows, False)
    sums = torch.randn(slices, rows, rank, device=bench.device, dtype=torch.float32)
    columns = widths_of(slices, width)
    size = 2 * distinct * rank * (width if row["up"] else slices * width)
    copies = min(_MOST_COPIES, max(1, -(-_KEPT_BYTES // size)))
    if row["up"]:
        out = bench.randn(rows, width)
        ups = [[bench.randn(slots, 1, each, rank) for each in columns] for _ in range(copies)]
        return Case(
            launch=lambda i: lora_expand(sums, ups[i % copies], out, *facts, offset_start=0, add_inputs=True),
            rotate=copies,
        )
    x = bench.randn(rows, width)
    downs = [[bench.randn(slots, 1, rank, width) for _ in range(slices)] for _ in range(copies)]
    return Case(launch=lambda i: lora_shrink(x, downs[i % copies], sums, *facts, 1.0), rotate=copies, kernels_each=2)


def widths_of(slices: int, width: int) -> list[int]:
    """Columns of each slice of a product's outputs.

    >>> widths_of(3, 6144), widths_of(2, 28672)
    ([4096, 1024, 1024], [14336, 14336])
    """
    if slices == 3:
        return [width * 2 // 3, width // 6, width // 6]
    return [width // slices] * slices
