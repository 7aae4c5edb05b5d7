"""The work of one kernel as a record describes it."""

from __future__ import annotations

from hardware.calibrate.fit_clocks import moved_bytes
from hardware.calibrate.suite.routing import rows_beyond128_of, tiles256_of
from sim.validation.inputs import Inputs, NotPredicted
from workloads.kernel_names import AllReduce, CollectiveOp, Elementwise
from workloads.work import (
    AttentionWork,
    CollectiveWork,
    DType,
    ElementwiseWork,
    GemmWork,
    GroupedGemmWork,
    Work,
)

FAST_ACCUMULATION = "8-bit products with fast accumulation, and of other values than normal ones, are not modelled"


def kernel_work(inputs: Inputs) -> Work:
    """The kernel of a row that runs a single one."""
    match inputs["kind"]:
        case "gemm":
            if inputs.get("fast_accumulation") or inputs.get("values", "normal") != "normal":
                raise NotPredicted(FAST_ACCUMULATION)
            return GemmWork(m=inputs["m"], n=inputs["n"], k=inputs["k"], dtype=DType(inputs.get("dtype", "bf16")))
        case "attention":
            return attention_work(inputs)
        case "grouped_gemm":
            fields = ("experts", "rows", "distinct", "tiles128", "n", "k")
            return GroupedGemmWork(
                tiles256=tiles256_of(inputs), rows_beyond128=rows_beyond128_of(inputs), **{f: inputs[f] for f in fields}
            )
        case "collective" | "alone":
            return CollectiveWork(
                op=CollectiveOp(inputs["op"]),
                ranks=tuple(range(inputs["world"])),
                buffer_bytes=inputs["bytes"],
                ctas=inputs.get("ctas"),
                # Our suite turns the addition in the switch off.
                algorithm=AllReduce.RING if inputs["op"] == "all_reduce" else AllReduce.LIBRARY,
            )
        case kind:
            rows = inputs.get("tokens") or inputs.get("rows") or 1
            moved = int(moved_bytes(inputs))
            return ElementwiseWork(
                op=Elementwise(kind),
                rows=rows,
                width=inputs.get("width") or moved // rows,
                bytes_moved=moved,
                blocks=rows * inputs["heads"] if "heads" in inputs else None,
            )


def attention_work(inputs: Inputs) -> AttentionWork:
    """The kernel of an attention row."""
    decode = inputs["phase"] == "decode"
    return AttentionWork(
        batch=inputs["batch"],
        q_len=1 if decode else inputs["seq_len"],
        kv_len=inputs.get("kv_len") or inputs["seq_len"],
        q_heads=inputs["q_heads"],
        kv_heads=inputs["kv_heads"],
        head_dim=inputs["head_dim"],
        causal=bool(inputs.get("causal", True)) and not decode,
    )
