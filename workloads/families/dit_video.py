"""A whole video: text encoder, denoising steps with guidance and reuse, VAE decoder.

The text encoder is coarse: plain T5 layers, and in unfused stacks a host that launches what its modules would. The
decoder is what its modules launch (``dit_decoder``), whatever the stack: no server fuses it. Every rank encodes the
text, the first one decodes, as Wan2.1's own code does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from workloads.diffusion import (
    DECODE,
    DECODER_BLOCKS,
    STEP,
    TEXT,
    TEXT_HEAD_DIM,
    DitSpec,
    Video,
    latent_grid,
    video_tokens,
)  # fmt: skip
from workloads.errors import WorkloadError
from workloads.families.dit import ELEMENT, Branch, check_branch, flash
from workloads.families.dit_decoder import LatentGrid, decoder_segments
from workloads.families.dit_layers import layer_segments
from workloads.kernel_names import AllReduce, Elementwise
from workloads.kernels import elementwise_kernel, exchange_kernel, host_kernel, product_kernel
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange
from workloads.ops import Op, fuse, op
from workloads.passes import Passes
from workloads.placement import bind
from workloads.program import Kernel, Phase, Program, RankProgram, Segment

Guidance = Literal["none", "batch", "sequential", "parallel"]
# What the solver reads: the latents of all tokens (P: a patch), and of both branches (G).
LATENTS = op("sm,mP->sP", parallel="s", label="latents")
BRANCHES = op("GsP,GsP->GsP", parallel="G", label="branches")
# Two sums over tokens, and over branches: the change of the proxy, and its size.
PROXY = op("Jsm,Jsm->J", parallel="s", label="proxy")
PROXIES = op("GJ,GJ->J", parallel="G", label="branches")
TIME_WIDTH = 256  # sines and cosines of a step's time, in all models of the catalog
TIME_VECTORS = 6  # shift, scale and gate of attention and feed-forward


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRun:
    """``videos`` made at once in ``len(computed)`` steps; False: the step reuses the last computed residual.

    ``guidance``: no second branch, both in one batch, one after the other, or on two groups of ``ulysses`` x ``ring``
    ranks. ``tokens`` replaces the video's where only the steps are wanted: no text encoder, no decoder. ``unfused`` and
    ``flash_2`` as of :class:`workloads.families.dit.Branch`.
    """

    spec: DitSpec
    tokens: int
    video: Video | None
    computed: Sequence[bool] = field(default=(True,))
    reuses: bool = False
    videos: int = 1
    guidance: Guidance = "none"
    ulysses: int = 1
    ring: int = 1
    layers: int | None = None
    unfused: Passes | None = None
    flash_2: bool = False

    @property
    def group(self) -> int:
        """Ranks that share one branch's tokens."""
        return self.ulysses * self.ring

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.group * (2 if self.guidance == "parallel" else 1)

    @property
    def branches(self) -> int:
        """Branches of a step."""
        return 1 if self.guidance == "none" else 2

    @property
    def at_once(self) -> int:
        """Sequences in one forward pass."""
        return self.videos * (2 if self.guidance == "batch" else 1)

    @property
    def passes(self) -> int:
        """Forward passes of a rank in a computed step."""
        return 2 if self.guidance == "sequential" else 1


def build_video(run: VideoRun) -> Program:
    """The programs of all ranks: groups of a branch side by side, Ulysses ranks innermost, then the ring.

    >>> from workloads.diffusion import load_dit
    >>> run = VideoRun(spec=load_dit("wan2.1-1.3b"), tokens=32_760, video=None, guidance="parallel", ring=2)
    >>> len(build_video(run).ranks), [phase.name for phase in build_video(run).ranks[0].phases]
    (4, ['denoise 1'])
    """
    if run.videos < 1 or not run.computed:
        raise WorkloadError(f"videos = {run.videos}, steps = {len(run.computed)}: give positive whole numbers")
    ulysses, ring = _members(run, 0)
    branch = Branch(
        spec=run.spec, tokens=run.tokens, batch=run.at_once, ulysses=ulysses, ring=ring, unfused=run.unfused,
        flash_2=run.flash_2,
    )  # fmt: skip
    check_branch(branch)
    whole, reused = _computed(run, branch), _reused(run, branch)
    phases = [
        Phase(name=f"{STEP} {i + 1}" + ("" if now else " (reused)"), segments=whole if now else reused)
        for i, now in enumerate(run.computed)
    ]
    decoder: tuple[Segment, ...] = ()
    if run.video is not None:
        phases = [Phase(name=TEXT, segments=_text(run)), *phases]
        decoder = _decode(run, run.video)
    template = RankProgram(phases=(*phases, Phase(name=DECODE, segments=())) if decoder else tuple(phases))
    first = RankProgram(phases=(*phases, Phase(name=DECODE, segments=decoder))) if decoder else template
    written = _groups(run, 0)
    ranks = []
    for rank in range(run.world):
        own = dict(zip(written, _groups(run, rank), strict=True))
        ranks.append(first if not rank else bind(template, own, ctas=None, all_reduce=AllReduce.LIBRARY))
    return Program(ranks=tuple(ranks))


def build_decoder(spec: DitSpec, video: Video, *, videos: int) -> Program:
    """The decoder alone, on one GPU."""
    run = VideoRun(spec=spec, tokens=video_tokens(spec, video), video=video, videos=videos)
    return Program(ranks=(RankProgram(phases=(Phase(name=DECODE, segments=_decode(run, video)),)),))


def _members(run: VideoRun, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The Ulysses ranks and the ring of ``rank``."""
    place = rank % run.ulysses
    base = rank - rank % run.group
    first = rank - place
    return tuple(range(first, first + run.ulysses)), tuple(base + i * run.ulysses + place for i in range(run.ring))


def _groups(run: VideoRun, rank: int) -> tuple[tuple[int, ...], ...]:
    """All groups of ``rank``: Ulysses, ring, its branch's ranks, its partner in the other branch."""
    base, inside = rank - rank % run.group, rank % run.group
    return (*_members(run, rank), tuple(range(base, base + run.group)), (inside, inside + run.group))


def _computed(run: VideoRun, branch: Branch) -> tuple[Segment, ...]:
    """A step in full; where residuals are reused it reads the proxy and keeps them."""
    layers = layer_segments(branch, run.layers)
    embed, head = _embed(branch), _head(run, branch)
    if run.reuses:
        head = (_pointwise("keep_residual", branch.own, run.spec.d_model, 3), *head)
    forward = (Segment(name="embed", kernels=embed), *layers, Segment(name="head", kernels=head))
    judged = (Segment(name="proxy", kernels=_judge(run, branch)),) if run.reuses else ()
    return (*forward * run.passes, *judged, Segment(name="scheduler", kernels=_schedule(run)))


def _reused(run: VideoRun, branch: Branch) -> tuple[Segment, ...]:
    """A step that adds the last residual: the first block of one branch is computed, to judge by."""
    video = replace(branch, batch=run.videos)
    head = (_pointwise("add_residual", branch.own, run.spec.d_model, 3), *_head(run, branch))
    return (
        Segment(name="embed", kernels=_embed(branch)),
        *layer_segments(video, 1),
        Segment(name="proxy", kernels=_judge(run, video)),
        *(Segment(name="head", kernels=head),) * run.passes,
        Segment(name="scheduler", kernels=_schedule(run)),
    )


def _embed(branch: Branch) -> tuple[Kernel, ...]:
    spec, width = branch.spec, branch.spec.d_model
    text = branch.own_text or branch.batch * spec.text_tokens
    return (
        product_kernel("time_gemm", branch.batch, width, TIME_WIDTH),
        product_kernel("time_vectors_gemm", branch.batch, TIME_VECTORS * width, width),
        product_kernel("text_gemm", text, width, spec.text_width),
        product_kernel("text_out_gemm", text, width, width),
        product_kernel("patch_gemm", branch.own, width, spec.patch_width),
    )


def _head(run: VideoRun, branch: Branch) -> tuple[Kernel, ...]:
    spec = run.spec
    kernels = [
        _pointwise("norm_out", branch.own, spec.d_model, 2),
        product_kernel("head_gemm", branch.own, spec.patch_width, spec.d_model),
    ]
    if run.group > 1:
        sizes = {"s": branch.own * run.group, "P": spec.patch_width}
        kernels.append(_owed(LATENTS, _groups(run, 0)[2], sizes))
    return tuple(kernels)


def _judge(run: VideoRun, branch: Branch) -> tuple[Kernel, ...]:
    """The change of the first block's output since the last step, over all ranks."""
    kernels = [_pointwise("proxy_change", branch.own, run.spec.d_model, 2)]
    if run.group > 1:
        kernels.append(_owed(PROXY, _groups(run, 0)[2], {"J": 2}))
    if run.guidance == "parallel":
        kernels.append(_owed(PROXIES, _groups(run, 0)[3], {"J": 2}))
    return tuple(kernels)


def _schedule(run: VideoRun) -> tuple[Kernel, ...]:
    """Guidance and one step of the solver, on every rank."""
    latents = run.videos * run.tokens
    width = run.spec.patch_width
    solve = _pointwise("scheduler_step", latents, width, 2 + run.branches)
    if run.guidance != "parallel":
        return (solve,)
    return (_owed(BRANCHES, _groups(run, 0)[3], {"G": run.branches, "s": latents, "P": width}), solve)


def _owed(one: Op, ranks: tuple[int, ...], sizes: dict[str, int]) -> Kernel:
    """What ``ranks`` that split ``one`` exchange so that each has the whole of its output."""
    exchange = shard((fuse(one.label, one),))[-1]
    assert isinstance(exchange, Exchange)
    return exchange_kernel(exchange.name, ranks, exchange.elements(sizes), exchange.op)


def _text(run: VideoRun) -> tuple[Segment, ...]:
    """All prompts of the run through the text encoders, on every rank."""
    spec, width = run.spec, run.spec.text_width
    prompts = run.videos * run.branches
    rows = prompts * spec.text_tokens
    kernels: tuple[Kernel, ...] = (
        _pointwise("norm_attn", rows, width, 4),
        product_kernel("qkv_gemm", rows, 3 * width, width),
        flash("attention", spec.text_tokens, spec.text_tokens, width // TEXT_HEAD_DIM, TEXT_HEAD_DIM, prompts),
        product_kernel("o_gemm", rows, width, width),
        _pointwise("norm_ff", rows, width, 4),
        product_kernel("gate_up_gemm", rows, 2 * spec.text_d_ff, width),
        _pointwise("gelu_mul", rows, spec.text_d_ff, 3),
        product_kernel("down_gemm", rows, width, spec.text_d_ff),
    )
    pooled: tuple[Segment, ...] = ()
    if run.unfused is not None:
        each_s, engine = run.unfused.launch_s, run.unfused.id
        if spec.text_launches:
            kernels = (*kernels, host_kernel("host", spec.text_launches * each_s, engine, stream=1))
        if spec.pooled_launches:
            pooled = (
                Segment(name="pooled text", kernels=(host_kernel("host", spec.pooled_launches * each_s, engine),)),
            )
    return (*pooled, Segment(name="text layer", kernels=kernels, repeat=spec.text_layers))


def _decode(run: VideoRun, video: Video) -> tuple[Segment, ...]:
    """The VAE's decoder; where its modules are not known each convolution as the product of its unfolded input, fused.

    Time doubles in the first stages, height and width behind all but the last.
    """
    spec, widths = run.spec, run.spec.decoder_widths
    along, down, across = (count * cell for count, cell in zip(latent_grid(spec, video), spec.patch, strict=True))
    if spec.decoder is not None:
        return decoder_segments(spec, LatentGrid(along, down, across), run.videos)
    frames, cells = along, down * across
    taps = 9 * spec.decoder_depth
    doublings = round(math.log2(spec.vae[0]))
    kernels: list[Kernel] = []
    before = spec.latent_channels
    for stage, width in enumerate(widths):
        in_time = 1 + (frames - 1) * 2 ** min(stage, doublings)
        rows = run.videos * in_time * cells * 4**stage
        norm = _pointwise("norm_silu", rows, width, 2)
        kernels += [product_kernel("conv_in", rows, width, (9 if stage else taps) * before), norm]
        kernels += [product_kernel("conv", rows, width, taps * width), norm] * (2 * DECODER_BLOCKS)
        before = width
    return (Segment(name="decoder", kernels=(*kernels, product_kernel("conv_out", rows, 3, taps * before))),)


def _pointwise(name: str, rows: int, width: int, tensors: int) -> Kernel:
    """A kernel that reads and writes ``tensors`` tensors of ``rows`` x ``width`` in all."""
    return elementwise_kernel(name, Elementwise.COPY, rows, width, tensors * rows * width * ELEMENT)


def guidance_of(text: Guidance) -> str:
    """What a guidance does, in words."""
    match text:
        case "none":
            return "one branch"
        case "batch":
            return "both branches in one batch"
        case "sequential":
            return "one branch after the other"
        case "parallel":
            return "a group of GPUs for each branch"
    assert_never(text)
