"""Sequence-parallel prefill with chunked overlap, diffusion-transformer blocks, and ring attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    high-priority stream with ``comm_ctas`` blocks while another chunk's GEMM runs.
    """
    shape, tp, chunks = shape_of(row["model"], bench.shapes), int(row["tp"]), int(row["overlap_chunks"])
    batch, tokens = int(row["batch"]), int(row["batch"]) * int(row["seq_len"])
    ctas = row.get("comm_ctas")
    if row["phase"] != "prefill" or row.get("lm_head") or tokens % (tp * chunks):
        raise HardwareError(
            f"sequence_parallel: a prefill without lm_head whose tokens ({tokens}) divide by tp x overlap_chunks"
        )
    layers = [Layer(bench, shape, tp=tp, fp8=row["dtype"] == "fp8_e4m3") for _ in range(row["layers"])]
    rotary = Rotary(bench, int(row["seq_len"]))
    x0, residual = bench.randn(tokens // tp, shape.width), bench.randn(tokens // tp, shape.width)
    side = SideStream(bench)
    piece, part = tokens // chunks, tokens // chunks // tp

    def gather(local: Tensor, i: int) -> Tensor:
        whole = bench.empty(piece, shape.width)
        mine = local[i * part : (i + 1) * part]
        bench.comm.collective("all_gather", whole.view(-1), mine.reshape(-1), ctas)
        return whole

    def gather_into(box: list[Tensor], local: Tensor, i: int) -> None:
        box.append(gather(local, i))

    def gathered(local: Tensor, use: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if chunks == 1:
            return [use(gather(local, 0))]
        side.fork()
        results = []
        for i in range(chunks):
            box: list[Tensor] = []
            event = side.run(partial(gather_into, box, local, i))
            side.main_waits(event)
            results.append(use(box[0]))
            kept.append(box[0])
        return results

    def scattered(pieces: list[Tensor], use: Callable[[Tensor], Tensor]) -> Tensor:
        out = bench.empty(tokens // tp, shape.width)
        for i, one in enumerate(pieces):
            y = use(one)
            kept.append(y)

            def scatter(i: int = i, y: Tensor = y) -> None:
                target = out[i * part : (i + 1) * part]
                bench.comm.collective("reduce_scatter", y.view(-1), target.view(-1), ctas)

            if chunks == 1:
                scatter()
            else:
                side.run_after_main(scatter)
        if chunks > 1:
            side.join()
        return out

    # Tensors that two streams touch must outlive both, or the allocator would hand them out again.
    kept: list[Tensor] = []

    def step() -> None:
        kept.clear()
        x = x0
        for layer in layers:
            local = layer.norm_attention(x, residual)
            pieces = gathered(local, layer.qkv)
            qkv = pieces[0] if chunks == 1 else bench.torch.cat(pieces)
            rotary(qkv, layer.q_heads + layer.kv_heads)
            attended = layer.attend_prompt(bench, qkv, batch)
            kept.append(attended)
            pieces = [attended[i * piece : (i + 1) * piece] for i in range(chunks)]
            x = scattered(pieces, layer.out)
            local = layer.norm_ff(x, residual)
            kept.append(local)
            gated = gathered(local, partial(activated, layer.feed_forward))
            x = scattered(gated, layer.feed_forward.down)

    return step


def activated(forward: FeedForward, hidden: Tensor) -> Tensor:
    """The first half of a feed-forward: what its down projection reads."""
    return forward.activate(forward.gate_up(hidden))


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
