"""Rows of a serving engine's kernels (kinds ``vllm_...``): what each is, and reading them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware.errors import HardwareError
from hardware.laws.decoder import ConvolutionSizes
from hardware.laws.engine_price import LAUNCH_S
from hardware.laws.sizes import MovedSizes

Row = Mapping[str, Any]
ENGINE_KINDS = frozenset(
    {
        "vllm_experts", "vllm_attention", "vllm_scaled_gemm", "vllm_quantise", "vllm_cache_write", "vllm_compiled",
        "vllm_gate", "vllm_act", "vllm_expert_sum", "vllm_sample", "vllm_all_reduce", "diffusers_pass",
        "diffusers_attention", "diffusers_linear", "diffusers_conv", "diffusers_image", "vllm_adapter",
    }
)  # fmt: skip
# Kernels as diffusers 0.42 launches them, with the bytes that each reads and writes for an element of its tensor.
PASS_BYTES = {
    "cast_up": 6, "cast_down": 6, "layer_norm_f32": 8, "layer_norm": 4, "rms_norm": 4, "head_rms_norm": 4,
    "row_f32": 8, "row_mixed": 6, "row": 4, "add_f32": 12, "add": 6, "square": 8, "head_mean": 4, "head_scale": 6,
    "head_gain": 4, "negate_half": 3, "interleave": 4, "table_f32": 8, "half_product": 4, "half_add_f32": 6,
    "half_store": 4, "gelu": 4, "cat_tokens": 4, "cat_width": 4, "copy_tokens": 4,
}  # fmt: skip
# Elements that kernels between a VAE decoder's convolutions read and write for one of their input; those that make
# more of it than they read are counted by their sizes.
IMAGE_ELEMENTS = {
    "group_norm": 3, "normalize": 3, "times": 2, "plus": 2, "gain": 2, "bias": 2, "silu": 2, "scale": 2, "add": 3,
    "swap_add": 3, "swap_copy": 2, "to_frames": 2, "upsample": 5, "upsample_exact": 5,
}  # fmt: skip
# Bytes an element of fused elementwise kernels: read, then written; FP8 results are one byte.
COMPILED_BYTES = {"add_rmsnorm": 8, "add_rmsnorm_fp8": 7, "silu_mul": 6, "silu_mul_fp8": 5, "rope": 4, "quantise": 3}


def further_launches(row: Row) -> int:
    """Launches in a row's time beyond the one kernel that a server runs.

    vLLM compiles with Inductor's ``combo_kernels``, so that queries and keys are rotated by one kernel (its traces have
    one a layer). Rows of both (``kv_heads``) were compiled without: two kernels.

    >>> further_launches({"kind": "vllm_compiled", "how": "rope", "kv_heads": 8})
    1
    >>> further_launches({"kind": "vllm_compiled", "how": "rope", "kv_heads": 8, "combined": True})
    0
    """
    both = row["kind"] == "vllm_compiled" and row["how"] == "rope" and "kv_heads" in row
    return int(both and not row.get("combined"))


def as_served(row: Row) -> Row:
    """``row`` less its further launches, at the same watts."""
    less_s = further_launches(row) * LAUNCH_S
    if not less_s:
        return row
    return {
        **row,
        "latency_s": row["latency_s"] - less_s,
        "energy_j": row["energy_j"] * (1.0 - less_s / row["latency_s"]),
    }


def moved_of(row: Row) -> MovedSizes:
    """What an elementwise row of the engine is."""
    match row["kind"]:
        case "vllm_quantise":
            op, rows, moved = f"quantise_{row['scales']}", row["tokens"], 3.0 * row["tokens"] * row["width"]
        case "vllm_cache_write":
            op, rows, moved = "cache_write", row["tokens"], 8.0 * row["tokens"] * row["kv_heads"] * 128
        case "vllm_compiled":
            op, rows = f"compiled_{row['how']}", row["tokens"]
            moved = float(COMPILED_BYTES[row["how"]] * row["tokens"] * row["width"])
        case "vllm_gate":
            op, rows, moved = "gate", row["tokens"], row["tokens"] * (4.0 * row["experts"] + 12.0 * row["top_k"])
        case "vllm_act":
            op, rows = "expert_act", row["tokens"] * row["top_k"]
            moved = 6.0 * rows * row["width"]
        case "vllm_expert_sum":
            op, rows = "expert_sum", row["tokens"]
            moved = 2.0 * (row["top_k"] + 1) * row["tokens"] * row["width"]
        case "vllm_sample":
            op, rows = "sample_random" if row["temperature"] else "sample_greedy", row["rows"]
            moved = 10.0 * row["rows"] * row["width"]
        case "diffusers_pass":
            op, rows = str(row["how"]), row["tokens"]
            moved = float(PASS_BYTES[op] * rows * row["width"])
        case "diffusers_image":
            images = row.get("batch") or 1
            rows = images * max(row["frames"], 1) * row["height"] * row["width"]
            return MovedSizes(op=image_op(row), rows=rows, bytes_moved=images * _image(row), images=images)
        case other:
            raise HardwareError(f"kind '{other}' is no elementwise kernel of an engine")
    return MovedSizes(op=op, rows=rows, bytes_moved=moved)


def image_op(row: Row) -> str:
    """The name of the law of a kernel between a decoder's convolutions; pixels of videos have a kernel of their own."""
    video = "_video" if row["how"] == "upsample" and row["frames"] else ""
    video = video or ("_nhwc" if row.get("layout") == "nhwc" else "")
    return f"image_{row['how']}{video}" + ("_f32" if row["dtype"] == "f32" else "")


def _image(row: Row) -> float:
    """Bytes of such a kernel for one image."""
    frames, height, width = max(row["frames"], 1), row["height"], row["width"]
    pixels = frames * height * width
    match row["how"]:
        case "pad":  # a frame wider on each side, two frames longer
            elements = pixels + (frames + 2) * (height + 2) * (width + 2)
        case "pad_zero":  # filled, then copied into
            elements = 2 * pixels + frames * (height + 2) * (width + 2)
        case "cat_frames":
            elements = 2 * (frames + 2) * height * width
        case "last_frames":
            elements = 2 * min(frames, 2) * height * width
        case how:
            elements = IMAGE_ELEMENTS[how] * pixels
    return float((4 if row["dtype"] == "f32" else 2) * row["channels"] * elements)


def convolution_of(row: Row) -> ConvolutionSizes:
    """Sizes of a ``diffusers_conv`` row."""
    images, area, kernel = max(row["frames"], 1), row["height"] * row["width"], row["kernel"]
    taps = (row.get("kernel_time") or kernel) if row["frames"] else 1
    return ConvolutionSizes(
        pixels=row["batch"] * images * area,
        read=row["batch"] * (images + taps - 1) * area,
        channels_in=row["channels_in"],
        channels_out=row["channels_out"],
        taps=taps * kernel * kernel,
        element=row["dtype"],
        channels_last=row.get("layout") == "nhwc_input",
    )


def prefill_of(row: Row) -> Row | None:
    """A row of flash attention over new tokens as one of vLLM's; None for any other row.

    Of diffusers' rows those of FlashAttention 2 and of cuDNN under a mask: without one, it is the libraries' kernel.
    """
    match row["kind"]:
        case "vllm_attention" if row["phase"] == "prefill" and row["kv_dtype"] == "bf16":
            return {**row, "causal": True, "kv_len": row.get("kv_len") or row["seq_len"]}
        case "diffusers_attention" if row["backend"] == "flash" or row.get("masked"):
            return {**row, "q_heads": row["heads"], "kv_heads": row["heads"], "causal": False}
        case _:
            return None


def read_engine_records(paths: Sequence[Path]) -> list[Row]:
    """Rows of an engine's kernels; any other kind is an error."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                row = json.loads(line)
                if row["work" if row["kind"] == "at_clock" else "kind"] not in (*ENGINE_KINDS, "nothing"):
                    raise HardwareError(f"{path}, line {number}: kind '{row['kind']}' is none of an engine's kernels")
                rows.append(row)
    return rows
