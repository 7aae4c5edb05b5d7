"""Layers of diffusion transformers where every operation between products is a kernel of its own (stack ``diffusers``).

As the modules of diffusers run them: queries, keys and values are three products, norms, modulation, rotation and
residual sums are chains of memory-bound kernels, images and text are copied together before they attend jointly.
"""

from __future__ import annotations

from collections.abc import Sequence

from workloads.diffusion import DitSpec
from workloads.families.dit import Branch, flash
from workloads.families.dit_shared import shared_attention
from workloads.kernel_names import EngineOp
from workloads.kernels import product_kernel
from workloads.passes import Passes
from workloads.program import Kernel, in_turn
from workloads.work import ElementwiseWork


def cross_block(branch: Branch, passes: Passes) -> list[Kernel]:
    """Self-attention, attention to the text, feed-forward; modulated and summed in 32 bit."""
    spec, own, width = branch.spec, branch.own, branch.spec.d_model
    text = branch.batch * spec.text_tokens
    run, cross = _Runner(passes), passes.cross
    return in_turn(
        run(cross["modulate"], "modulate_attn", own, width),
        _products(("q_gemm", "k_gemm", "v_gemm"), own, width, width),
        [one for part in ("q", "k") for one in run(cross["qk_norm"], f"{part}_norm", own, width)],
        [one for part in ("q", "k") for one in run(cross["rotate"], f"rope_{part}", own, width)],
        shared_attention(branch, passes, run),
        [product_kernel("o_gemm", own, width, width)],
        run(cross["gate"], "gate_attn", own, width),
        run(cross["norm_text"], "norm_text", own, width),
        [product_kernel("q_text_gemm", own, width, width)],
        _products(("k_text_gemm", "v_text_gemm"), text, width, width),
        run(cross["qk_norm"], "q_text_norm", own, width),
        run(cross["qk_norm"], "k_text_norm", text, width),
        [
            branch.attending(
                flash("cross_attention", own // branch.batch, spec.text_tokens, spec.heads, spec.head_dim, branch.batch)
            ),
            product_kernel("o_text_gemm", own, width, width),
        ],
        run(cross["add_text"], "add_text", own, width),
        run(cross["modulate"], "modulate_ff", own, width),
        _feed(run, own, spec),
        run(cross["gate_feed"], "gate_ff", own, width),
    )


def double_block(branch: Branch, passes: Passes) -> list[Kernel]:
    """Image and text with weights of their own, copied together to attend."""
    spec, width = branch.spec, branch.spec.d_model
    run, joint, norm = _Runner(passes), passes.joint, passes.qk_norm(branch.spec.id)
    before: list[Kernel] = []
    after: list[Kernel] = []
    for name, rows in (("image", branch.own), ("text", branch.own_text)):
        before += [product_kernel(f"modulation_{name}_gemm", branch.batch, 6 * width, width)]
        before += run(joint["modulate"], f"modulate_{name}", rows, width)
        before += _products((f"q_{name}_gemm", f"k_{name}_gemm", f"v_{name}_gemm"), rows, width, width)
        before += [one for part in ("q", "k") for one in run(norm, f"{part}_norm_{name}", rows, width)]
        after += [product_kernel(f"o_{name}_gemm", rows, width, width)]
        after += run(joint["gate"], f"gate_{name}", rows, width)
        after += run(joint["modulate"], f"modulate_ff_{name}", rows, width)
        after += _feed(run, rows, spec)
        after += run(joint["gate"], f"gate_ff_{name}", rows, width)
    rows = branch.own + branch.own_text
    return in_turn(
        before,
        [one for part in ("q", "k", "v") for one in run((EngineOp.CAT_TOKENS,), f"join_{part}", rows, width)],
        [one for part in ("q", "k") for one in run(joint["rotate"], f"rope_{part}", rows, width)],
        shared_attention(branch, passes, run),
        after,
    )


def single_block(branch: Branch, passes: Passes) -> list[Kernel]:
    """Attention and feed-forward side by side on image and text, copied together before one product out of both."""
    spec, width = branch.spec, branch.spec.d_model
    rows = branch.own + branch.own_text
    run, joint, norm = _Runner(passes), passes.joint, passes.qk_norm(branch.spec.id)
    return in_turn(
        run((EngineOp.CAT_TOKENS,), "join", rows, width),
        [product_kernel("modulation_gemm", branch.batch, 3 * width, width)],
        run(joint["modulate"], "modulate", rows, width),
        [product_kernel("up_gemm", rows, spec.d_ff, width)],
        run((EngineOp.GELU,), "gelu", rows, spec.d_ff),
        _products(("q_gemm", "k_gemm", "v_gemm"), rows, width, width),
        [one for part in ("q", "k") for one in run(norm, f"{part}_norm", rows, width)],
        [one for part in ("q", "k") for one in run(joint["rotate"], f"rope_{part}", rows, width)],
        run(passes.single_joins(spec.id), "rejoin", rows, width),
        shared_attention(branch, passes, run),
        run((EngineOp.CAT_WIDTH,), "join_feed", rows, width + spec.d_ff),
        [product_kernel("o_down_gemm", rows, width, width + spec.d_ff)],
        run(joint["gate"], "gate", rows, width),
    )


class _Runner:
    """Chains of memory-bound kernels of one implementation, named after their place."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def __call__(self, ops: Sequence[EngineOp], place: str, rows: int, width: int) -> list[Kernel]:
        return [self._kernel(op, place if len(ops) == 1 else f"{place}.{op.value}", rows, width) for op in ops]

    def _kernel(self, op: EngineOp, name: str, rows: int, width: int) -> Kernel:
        moved = self._passes.element_bytes[op] * rows * width
        work = ElementwiseWork(op=op, rows=rows, width=width, bytes_moved=moved, engine=self._passes.id)
        return Kernel(name=name, work=work, flops=float(rows * width), bytes_moved=float(moved))


def _products(names: Sequence[str], rows: int, n: int, k: int) -> list[Kernel]:
    return [product_kernel(name, rows, n, k) for name in names]


def _feed(run: _Runner, rows: int, spec: DitSpec) -> list[Kernel]:
    return [
        product_kernel("up_gemm", rows, spec.d_ff, spec.d_model),
        *run((EngineOp.GELU,), "gelu", rows, spec.d_ff),
        product_kernel("down_gemm", rows, spec.d_model, spec.d_ff),
    ]
