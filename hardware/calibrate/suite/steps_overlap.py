"""Sequence-parallel prefill with chunked overlap, diffusion-transformer blocks, and ring attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hardware.calibrate.suite.layers import FeedForward, Layer, Norm, Projection, Rotary
from hardware.calibrate.suite.shapes import HEAD_DIM, WAN_TEXT_TOKENS, shape_of
from hardware.calibrate.suite.side_stream import SideStream
from hardware.calibrate.suite.timing import Bench, capture, steady, together
from hardware.errors import HardwareError

Row = Mapping[str, Any]
Tensor = Any
_STEP_WINDOW_S = 1.05


def overlap_step(bench: Bench, row: Row) -> Callable[[], None]:
    """Norms on tokens/tp rows; all-gather + GEMM and GEMM + reduce-scatter, cut along tokens into chunks.

    With one chunk everything is in one stream. With more, chunk i's collective runs on a second,
    high-priority stream with ``comm_ctas`` blocks while another chunk's GEMM runs. ``overlap_ops`` gives products
    their own (``{"qkv_gemm": {"chunks": 4, "comm_ctas": 8}}``) instead of ``overlap_chunks`` and ``comm_ctas``.
    """
    shape, tp = shape_of(row["model"], bench.shapes), int(row["tp"])
    batch, tokens = int(row["batch"]), int(row["batch"]) * int(row["seq_len"])
    cuts = cuts_of(row)
    if row["phase"] != "prefill" or row.get("lm_head") or any(tokens % (tp * cut.chunks) for cut in cuts.values()):
        raise HardwareError(
            f"sequence_parallel: a prefill without lm_head whose tokens ({tokens}) divide by tp x overlap_chunks"
        )
    layers = [Layer(bench, shape, tp=tp, fp8=row["dtype"] == "fp8_e4m3") for _ in range(row["layers"])]
    rotary = Rotary(bench, int(row["seq_len"]))
    x0, residual = bench.randn(tokens // tp, shape.width), bench.randn(tokens // tp, shape.width)
    side = SideStream(bench)

    def gather(local: Tensor, i: int, cut: Cut) -> Tensor:
        piece, part = tokens // cut.chunks, tokens // cut.chunks // tp
        whole = bench.empty(piece, shape.width)
        mine = local[i * part : (i + 1) * part]
        bench.comm.collective("all_gather", whole.view(-1), mine.reshape(-1), cut.comm_ctas)
        return whole

    def gather_into(box: list[Tensor], local: Tensor, i: int, cut: Cut) -> None:
        box.append(gather(local, i, cut))

    def gathered(local: Tensor, cut: Cut, use: Callable[[int, Tensor], object]) -> None:
        """``use`` piece by piece of all ranks' rows."""
        if cut.chunks == 1:
            use(0, gather(local, 0, cut))
            return
        side.fork()
        for i in range(cut.chunks):
            box: list[Tensor] = []
            event = side.run(partial(gather_into, box, local, i, cut))
            side.main_waits(event)
            use(i, box[0])
            kept.append(box[0])

    def scattered(whole: Tensor, cut: Cut, use: Callable[[Tensor], Tensor]) -> Tensor:
        piece, part = tokens // cut.chunks, tokens // cut.chunks // tp
        out = bench.empty(tokens // tp, shape.width)
        for i in range(cut.chunks):
            y = use(whole[i * piece : (i + 1) * piece])
            kept.append(y)

            def scatter(i: int = i, y: Tensor = y) -> None:
                target = out[i * part : (i + 1) * part]
                bench.comm.collective("reduce_scatter", y.view(-1), target.view(-1), cut.comm_ctas)

            if cut.chunks == 1:
                scatter()
            else:
                side.run_after_main(scatter)
        if cut.chunks > 1:
            side.join()
        return out

    # Tensors that two streams touch must outlive both, or the allocator would hand them out again.
    kept: list[Tensor] = []

    def step() -> None:
        kept.clear()
        x = x0
        for layer in layers:
            local = layer.norm_attention(x, residual)
            pieces: list[Tensor] = []

            def project(_: int, rows: Tensor, layer: Layer = layer, pieces: list[Tensor] = pieces) -> None:
                pieces.append(layer.qkv(rows))

            gathered(local, cuts["qkv_gemm"], project)
            qkv = pieces[0] if len(pieces) == 1 else bench.torch.cat(pieces)
            rotary(qkv, layer.q_heads + layer.kv_heads)
            attended = layer.attend_prompt(bench, qkv, batch)
            kept.append(attended)
            x = scattered(attended, cuts["o_gemm"], layer.out)
            local = layer.norm_ff(x, residual)
            kept.append(local)
            forward = layer.feed_forward
            gated = bench.empty(tokens, forward.width)
            kept.append(gated)

            def feed(i: int, rows: Tensor, forward: FeedForward = forward, gated: Tensor = gated) -> None:
                size = rows.shape[0]
                bench.kernels.silu_mul(forward.gate_up(rows), gated[i * size : (i + 1) * size])

            gathered(local, cuts["gate_up_gemm"], feed)
            x = scattered(gated, cuts["down_gemm"], forward.down)

    return step


PRODUCTS = ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Pieces of a product beside its collective, and the blocks of that (None: NCCL's choice)."""

    chunks: int = 1
    comm_ctas: int | None = None


def cuts_of(row: Row) -> dict[str, Cut]:
    """The cut of each product of a layer.

    >>> cuts_of({"overlap_ops": {"o_gemm": {"chunks": 4, "comm_ctas": 8}}})["o_gemm"].chunks
    4
    """
    all_alike = Cut(chunks=int(row.get("overlap_chunks") or 1), comm_ctas=row.get("comm_ctas"))
    ops = row.get("overlap_ops") or {}
    if unknown := sorted(set(ops) - set(PRODUCTS)):
        raise HardwareError(f"overlap_ops = '{unknown[0]}': products of a layer are {', '.join(PRODUCTS)}")
    return {name: Cut(**ops[name]) if name in ops else all_alike for name in PRODUCTS}


def measure_dit(bench: Bench, row: Row) -> dict[str, Any]:
    """One denoising branch of a Wan2.1-shaped diffusion transformer, ``ulysses`` ranks sharing the tokens."""
    replay = capture(bench, dit_step(bench, row))
    return together(bench, steady(bench, replay, 1, window_s=_STEP_WINDOW_S))


def dit_step(bench: Bench, row: Row) -> Callable[[], None]:
    """Self-attention over all tokens, cross-attention to the text, GELU feed-forward; see the records."""
    shape, n, tokens = shape_of(row["model"], bench.shapes), int(row["ulysses"]), int(row["tokens"])
    text = int(row.get("text_tokens", WAN_TEXT_TOKENS))
    if tokens % n or shape.q_heads % n:
        raise HardwareError(f"ulysses = {n} divides neither tokens = {tokens} nor heads = {shape.q_heads}")
    own, heads, width = tokens // n, shape.q_heads // n, shape.width
    kernels, torch, comm = bench.kernels, bench.torch, bench.comm
    blocks = [
        {
            "norms": [Norm(bench, width) for _ in range(3)],
            "qkv": Projection(bench, 3 * width, width),
            "out": Projection(bench, width, width),
            "q_text": Projection(bench, width, width),
            "kv_text": Projection(bench, 2 * width, width),
            "out_text": Projection(bench, width, width),
            "up": Projection(bench, shape.ff, width),
            "down": Projection(bench, width, shape.ff),
        }
        for _ in range(row["layers"])
    ]
    rotary = Rotary(bench, own)
    x0, residual, words = bench.randn(own, width), bench.randn(own, width), bench.randn(text, width)

    def self_attention(qkv: Tensor) -> Tensor:
        if n > 1:
            by_rank = qkv.view(own, n, 3 * heads * HEAD_DIM).transpose(0, 1).contiguous()
            arrived = torch.empty_like(by_rank)
            comm.collective("all_to_all", by_rank.view(-1), arrived.view(-1), None)
            qkv = arrived
        view = qkv.view(1, tokens, 3 * heads, HEAD_DIM)
        q, k, v = (part.transpose(1, 2) for part in view.split([heads] * 3, dim=2))
        out = kernels.attention(q, k, v, causal=False).transpose(1, 2)
        if n == 1:
            return out.reshape(tokens, width)
        sent = out.reshape(n, own, heads * HEAD_DIM)
        back = torch.empty_like(sent)
        comm.collective("all_to_all", sent.reshape(-1), back.view(-1), None)
        return back.transpose(0, 1).reshape(own, width)

    def step() -> None:
        x = x0
        for block in blocks:
            norms: Any = block["norms"]
            b: Any = block
            qkv = b["qkv"](norms[0](x, residual))
            rotary(qkv, 2 * shape.q_heads)
            x = b["out"](self_attention(qkv))
            q = b["q_text"](norms[1](x, residual)).view(1, own, shape.q_heads, HEAD_DIM).transpose(1, 2)
            kv = b["kv_text"](words).view(1, text, 2 * shape.q_heads, HEAD_DIM)
            k, v = (part.transpose(1, 2) for part in kv.split([shape.q_heads] * 2, dim=2))
            x = b["out_text"](kernels.attention(q, k, v, causal=False).transpose(1, 2).reshape(own, width))
            x = b["down"](kernels.gelu(b["up"](norms[2](x, residual))))

    return step


def measure_ring(bench: Bench, row: Row) -> dict[str, Any]:
    """Forward ring attention: a block's attention while K and V go to the next rank on a second stream."""
    comm, torch = bench.comm, bench.torch
    block = int(row["seq_len"]) // comm.world
    q_heads, kv_heads = int(row["q_heads"]), int(row["kv_heads"])
    q = bench.randn(1, q_heads, block, HEAD_DIM)
    blocks = [bench.randn(2, 1, kv_heads, block, HEAD_DIM) for _ in range(2)]
    side = SideStream(bench)
    striped = row["layout"] == "striped"
    if row["layout"] not in ("striped", "contiguous"):
        raise HardwareError(f"layout = '{row['layout']}': striped or contiguous")

    def step() -> None:
        here, there = blocks
        for turn in range(comm.world):
            side.fork()
            if turn < comm.world - 1:
                side.run(partial(comm.collective, "sendrecv_ring", here.view(-1), there.view(-1), None))
            owner = (comm.rank - turn) % comm.world
            if striped or owner <= comm.rank:
                causal = striped or owner == comm.rank
                bench.kernels.attention(q, here[0], here[1], causal=causal)
            side.join()
            here, there = there, here

    for _ in range(2):
        step()
    if not bench.dry:
        torch.cuda.synchronize()
    return together(bench, steady(bench, step, 1, window_s=_STEP_WINDOW_S))
