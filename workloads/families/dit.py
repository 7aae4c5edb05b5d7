"""Video diffusion transformers: the blocks of one denoising branch, alone or with tokens spread over Ulysses ranks."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.errors import WorkloadError
from workloads.kernels import elementwise_kernel
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import AttentionWork, CollectiveOp, CollectiveWork, DType, Elementwise, GemmWork

ELEMENT = DType.BF16.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DitSpec:
    """A diffusion transformer as sizes; ``patch`` and ``vae`` divide (frames, height, width) into latent tokens."""

    id: str
    source: str
    d_model: int
    layers: int
    heads: int
    head_dim: int
    d_ff: int
    text_tokens: int = 512
    vae: tuple[int, int, int] = (4, 8, 8)
    patch: tuple[int, int, int] = (1, 2, 2)


DITS = {
    spec.id: spec
    for spec in (
        DitSpec(
            id="wan2.1-1.3b", source="config.json of Wan-AI/Wan2.1-T2V-1.3B",
            d_model=1536, layers=30, heads=12, head_dim=128, d_ff=8960,
        ),
        DitSpec(
            id="wan2.1-14b", source="config.json of Wan-AI/Wan2.1-T2V-14B",
            d_model=5120, layers=40, heads=40, head_dim=128, d_ff=13824,
        ),
    )
}  # fmt: skip


def load_dit(name: str) -> DitSpec:
    """A diffusion transformer by id.

    >>> load_dit("wan2.1-14b").heads
    40
    """
    if name not in DITS:
        raise WorkloadError(f"unknown diffusion transformer '{name}': known: {', '.join(DITS)}")
    return DITS[name]


def video_tokens(spec: DitSpec, *, frames: int, height: int, width: int) -> int:
    """Latent tokens of a video: the first frame alone, then one latent frame for each ``vae[0]``.

    >>> video_tokens(load_dit("wan2.1-1.3b"), frames=81, height=480, width=832)
    32760
    >>> video_tokens(load_dit("wan2.1-14b"), frames=81, height=720, width=1280)
    75600
    """
    steps = [(1 + (frames - 1) // spec.vae[0]) // spec.patch[0]]
    for size, name, axis in ((height, "height", 1), (width, "width", 2)):
        cell = spec.vae[axis] * spec.patch[axis]
        if size % cell:
            raise WorkloadError(f"{name} = {size}: {spec.id} cuts it into cells of {cell}: give a multiple")
        steps.append(size // cell)
    return steps[0] * steps[1] * steps[2]


def build_denoise(spec: DitSpec, *, tokens: int, layers: int | None = None, ulysses: int = 1) -> Program:
    """One branch of one denoising step over ``tokens`` latent tokens, ``ulysses`` ranks sharing them.

    A block: add + RMSNorm, QKV GEMM, RoPE on queries and keys, (with ranks: sort by rank, all-to-all,) attention over
    all tokens, (all-to-all, sort back,) output GEMM; add + RMSNorm, cross-attention to the text (query GEMM, key/value
    GEMM, attention, output GEMM); add + RMSNorm, GEMM, GELU, GEMM.
    """
    count = spec.layers if layers is None else layers
    if not 1 <= count <= spec.layers:
        raise WorkloadError(f"layers = {count}: {spec.id} has {spec.layers}")
    if tokens < 1 or ulysses < 1 or tokens % ulysses or spec.heads % ulysses:
        raise WorkloadError(
            f"ulysses = {ulysses}: must divide the {tokens} tokens and the {spec.heads} heads of {spec.id}"
        )
    block = Segment(name="layer", kernels=tuple(_block(spec, tokens, ulysses)), repeat=count)
    rank = RankProgram(phases=(Phase(name="denoise", segments=(block,)),))
    return Program(ranks=(rank,) * ulysses)


def _block(spec: DitSpec, tokens: int, ranks: int) -> list[Kernel]:
    own, width, heads = tokens // ranks, spec.d_model, spec.heads // ranks
    group = tuple(range(ranks))
    qkv, out = 3 * own * width, own * width  # elements that a rank sends before and after attention
    into = [_copy("permute_qkv", own, 3 * width), _exchange("all_to_all_qkv", group, qkv)] if ranks > 1 else []
    back = [_exchange("all_to_all_out", group, out), _copy("permute_out", own, width)] if ranks > 1 else []
    turned = 2 * own * 2 * width * ELEMENT
    return [
        _norm("add_rmsnorm_attn", own, width),
        _gemm("qkv_gemm", own, 3 * width, width),
        elementwise_kernel("rope", Elementwise.ROPE, own, 2 * width, turned, blocks=own * 2 * spec.heads),
        *into,
        _attention("attention", tokens, tokens, heads, spec.head_dim),
        *back,
        _gemm("o_gemm", own, width, width),
        _norm("add_rmsnorm_text", own, width),
        _gemm("q_text_gemm", own, width, width),
        _gemm("kv_text_gemm", spec.text_tokens, 2 * width, width),
        _attention("cross_attention", own, spec.text_tokens, spec.heads, spec.head_dim),
        _gemm("o_text_gemm", own, width, width),
        _norm("add_rmsnorm_ff", own, width),
        _gemm("up_gemm", own, spec.d_ff, width),
        elementwise_kernel("gelu", Elementwise.GELU, own, spec.d_ff, 2 * own * spec.d_ff * ELEMENT),
        _gemm("down_gemm", own, width, spec.d_ff),
    ]


def _norm(name: str, rows: int, width: int) -> Kernel:
    return elementwise_kernel(name, Elementwise.ADD_RMSNORM, rows, width, 4 * rows * width * ELEMENT)


def _copy(name: str, rows: int, width: int) -> Kernel:
    return elementwise_kernel(name, Elementwise.PERMUTE_COPY, rows, width, 2 * rows * width * ELEMENT)


def _gemm(name: str, m: int, n: int, k: int) -> Kernel:
    moved = ELEMENT * (m * k + n * k + m * n)
    return Kernel(name=name, work=GemmWork(m=m, n=n, k=k), flops=2.0 * m * n * k, bytes_moved=float(moved))


def _attention(name: str, queries: int, keys: int, heads: int, head_dim: int) -> Kernel:
    work = AttentionWork(
        batch=1, q_len=queries, kv_len=keys, q_heads=heads, kv_heads=heads, head_dim=head_dim, causal=False
    )
    moved = ELEMENT * heads * head_dim * 2 * (queries + keys)
    return Kernel(name=name, work=work, flops=4.0 * queries * keys * heads * head_dim, bytes_moved=float(moved))


def _exchange(name: str, ranks: tuple[int, ...], elements: int) -> Kernel:
    buffer = elements * ELEMENT
    work = CollectiveWork(op=CollectiveOp.ALL_TO_ALL, ranks=ranks, buffer_bytes=buffer)
    return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(buffer))
