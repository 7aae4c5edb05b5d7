"""Kernel rows of a serving engine (kinds ``vllm_...``) as the work that its stack would run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.calibrate.engine_rows import moved_of
from workloads.work import (
    AttentionWork,
    CollectiveOp,
    CollectiveWork,
    DType,
    ElementwiseWork,
    EngineOp,
    GemmWork,
    RoutedGemmWork,
    Work,
)

ENGINE = "vllm"


def engine_kernel(inputs: Mapping[str, Any]) -> Work | None:
    """The kernel of a row; None for a chain of several."""
    match inputs["kind"]:
        case "vllm_experts" if inputs["part"] != "all":
            up = inputs["part"] == "gate_up"
            n, k = (2 * inputs["ff"], inputs["hidden"]) if up else (inputs["hidden"], inputs["ff"])
            return RoutedGemmWork(
                engine=ENGINE,
                experts=inputs["local"],
                inner=inputs["ff"],
                tokens=inputs["tokens"],
                rows=round(inputs["rows"]),
                distinct=round(inputs["distinct"]),
                tiles=((inputs["config"]["BLOCK_SIZE_M"], inputs["tiles"]),),
                n=n,
                k=k,
                dtype=DType(inputs["dtype"]),
                scales="block" if inputs.get("block") else None,
            )
        case "vllm_experts":
            return None
        case "vllm_attention":
            decode = inputs["phase"] == "decode"
            return AttentionWork(
                batch=inputs["batch"],
                q_len=1 if decode else inputs["seq_len"],
                kv_len=inputs.get("kv_len") or inputs["seq_len"],
                q_heads=inputs["q_heads"],
                kv_heads=inputs["kv_heads"],
                head_dim=inputs["head_dim"],
                causal=not decode,
                kv_dtype=DType(inputs["kv_dtype"]),
                engine=ENGINE,
            )
        case "vllm_scaled_gemm":
            return GemmWork(
                m=inputs["m"], n=inputs["n"], k=inputs["k"], dtype=DType.FP8, engine=ENGINE, scales=inputs["scales"]
            )
        case "vllm_all_reduce":
            ranks = tuple(range(inputs["world"]))
            return CollectiveWork(op=CollectiveOp.ALL_REDUCE, ranks=ranks, buffer_bytes=inputs["bytes"], engine=ENGINE)
        case _:
            moved = moved_of(inputs)
            return ElementwiseWork(
                op=EngineOp(moved.op), rows=moved.rows, width=1, bytes_moved=round(moved.bytes_moved), engine=ENGINE
            )
