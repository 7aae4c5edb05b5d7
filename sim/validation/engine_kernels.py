"""Kernel rows of an engine (kinds ``vllm_...``, ``diffusers_...``) as the work that its stack would run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware.calibrate.engine_rows import convolution_of, further_launches, moved_of
from hardware.calibrate.suite.cases_vllm_lora import widths_of
from hardware.laws.decoder import MOST_FLASH_HEAD_DIM
from sim.validation.inputs import NotPredicted
from sim.validation.kernel_work import attention_work
from workloads.kernel_names import CollectiveOp, Elementwise, EngineOp
from workloads.work import (
    AdapterGemmWork,
    AttentionWork,
    CollectiveWork,
    ConvolutionWork,
    DType,
    ElementwiseWork,
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
            return replace(attention_work(inputs), kv_dtype=DType(inputs["kv_dtype"]), engine=ENGINE)
        case "vllm_scaled_gemm":
            return GemmWork(
                m=inputs["m"], n=inputs["n"], k=inputs["k"], dtype=DType.FP8, engine=ENGINE, scales=inputs["scales"]
            )
        case "vllm_adapter":
            return _adapters(inputs)
        case "vllm_all_reduce":
            ranks = tuple(range(inputs["world"]))
            return CollectiveWork(op=CollectiveOp.ALL_REDUCE, ranks=ranks, buffer_bytes=inputs["bytes"], engine=ENGINE)
        case "diffusers_attention":
            return _diffusers_attention(inputs)
        case "diffusers_linear":
            return GemmWork(m=inputs["m"], n=inputs["n"], k=inputs["k"])
        case "diffusers_conv":
            return _convolution(inputs)
        case kind:
            moved = moved_of(inputs)
            engine = "diffusers" if kind in ("diffusers_pass", "diffusers_image") else ENGINE
            if moved.op not in set(EngineOp):
                raise NotPredicted(f"how = '{moved.op}' is run by no stack")
            return ElementwiseWork(
                op=EngineOp(moved.op), rows=moved.rows, width=1, bytes_moved=round(moved.bytes_moved),
                images=moved.images, engine=engine,
            )  # fmt: skip


def before(inputs: Mapping[str, Any]) -> tuple[Work, ...]:
    """What a row's kernel is launched with, in its time: adapters' sums are cleared on the way down.

    Rows of two kernels that a server runs as one have a launch more.
    """
    if further := further_launches(inputs):
        return (ElementwiseWork(op=EngineOp.LAUNCH, rows=further, width=1, bytes_moved=0, engine=ENGINE),)
    if inputs["kind"] != "vllm_adapter" or inputs["up"]:
        return ()
    rows = inputs["slices"] * inputs["tokens"]
    moved = 4 * rows * inputs["rank"]
    return (ElementwiseWork(op=Elementwise.COPY, rows=rows, width=inputs["rank"], bytes_moved=moved),)


def _adapters(inputs: Mapping[str, Any]) -> AdapterGemmWork:
    """One half of a product's adapters, of a server with ``slots`` (if the row says none: as many as adapters)."""
    return AdapterGemmWork(
        rows=inputs["tokens"],
        distinct=min(inputs["adapters"], inputs["tokens"]),
        slices=inputs["slices"],
        rank=inputs["rank"],
        width=inputs["width"],
        up=inputs["up"],
        widest=max(widths_of(inputs["slices"], inputs["width"])) if inputs["up"] else None,
        slots=inputs.get("slots") or inputs["adapters"],
    )


def _convolution(inputs: Mapping[str, Any]) -> ConvolutionWork:
    """A convolution with its copies and its bias; without them (``layout``) no stack runs it."""
    if inputs.get("layout") == "nhwc":
        raise NotPredicted("decoders run convolutions with the copies around them: layout = 'nhwc' leaves these out")
    sizes = convolution_of(inputs)
    return ConvolutionWork(
        pixels=sizes.pixels,
        read=sizes.read,
        channels_in=sizes.channels_in,
        channels_out=sizes.channels_out,
        taps=sizes.taps,
        channels_last=sizes.channels_last,
        dtype=_element(inputs["dtype"]),
        engine="diffusers",
    )


def _element(name: str) -> DType:
    """The type that rows of decoders call by its short name."""
    return DType.FP32 if name == "f32" else DType.BF16


def _diffusers_attention(inputs: Mapping[str, Any]) -> AttentionWork:
    """PyTorch's attention: cuDNN's is the libraries'; FlashAttention 2, a mask, wide heads have own laws."""
    masked = bool(inputs.get("masked"))
    wide = inputs["head_dim"] > MOST_FLASH_HEAD_DIM
    if not wide and inputs["backend"] not in ("flash", "cudnn"):
        raise NotPredicted(f"backend = '{inputs['backend']}' has no law: flash and cudnn have")
    return AttentionWork(
        batch=inputs["batch"],
        q_len=inputs["seq_len"],
        kv_len=inputs["kv_len"],
        q_heads=inputs["heads"],
        kv_heads=inputs["heads"],
        head_dim=inputs["head_dim"],
        causal=False,
        engine="diffusers" if inputs["backend"] == "flash" or masked or wide else None,
        dtype=_element(inputs.get("dtype", "bf16")),
        masked=masked,
    )
