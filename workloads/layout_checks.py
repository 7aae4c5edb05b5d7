"""Whether the sizes of a model and of its work allow a layout; refusals say which degree would do."""

from __future__ import annotations

from dataclasses import replace

from workloads.errors import WorkloadError
from workloads.model import ModelSpec
from workloads.parallel import Layout


def check_layout(
    model: ModelSpec,
    layout: Layout,
    *,
    batch: int,
    new_tokens: int,
    layers: int | None = None,
    expert_copies: int | None = None,
) -> None:
    """Refuse a split that the sizes do not allow; says which degree would. ``new_tokens`` is per sequence."""
    _check_degrees(layout)
    _check_experts(model, layout, expert_copies)
    for one in map(model.of, model.blocks):
        _check_tensors(one, layout)
    _check_batch(layout, batch)
    depth = model.layers if layers is None else layers
    if layout.pp > depth:
        raise WorkloadError(f"pp = {layout.pp}: {depth} layers fill at most {depth} stages: use pp = {depth} or less")
    if layout.pp > 1 and any(block.shares for block in model.blocks):
        raise WorkloadError(f"pp = {layout.pp}: layers of {model.id} read the keys of earlier ones: use tp")
    if layout.pp > 1 and any(block.tied for block in model.blocks):
        raise WorkloadError(f"pp = {layout.pp}: layers of {model.id} have weights of earlier ones: use tp")
    if layout.spreads:
        named = f"dcp = {layout.dcp}" if layout.dcp > 1 else "cp_mode = 'all_gather'"
        raise WorkloadError(f"{named}: is of a single step, or a server's: leave it out, or use cp_mode = 'ulysses'")
    if layout.cp > 1:
        for one in map(model.of, model.blocks):
            _check_context(one, layout, batch=batch, new_tokens=new_tokens)
    tokens = batch * new_tokens // (layout.dp * layout.micro_batches)
    if layout.sequence_parallel and layout.tp == 1:
        raise WorkloadError("sequence_parallel: needs tp of at least 2")
    if layout.sequence_parallel and tokens % layout.tp:
        raise WorkloadError(f"sequence_parallel: tp = {layout.tp} does not divide the {tokens} tokens of the step")


def _check_degrees(layout: Layout) -> None:
    for name in ("tp", "ep", "cp", "dcp", "pp", "dp", "micro_batches"):
        if getattr(layout, name) < 1:
            raise WorkloadError(f"{name} = {getattr(layout, name)}: give a positive whole number")


def _check_tensors(model: ModelSpec, layout: Layout) -> None:
    tp = layout.tp
    if model.q_heads % tp:
        raise WorkloadError(
            f"tp = {tp} does not divide the {model.q_heads} query heads of {model.id}: use {_divisors(model.q_heads)}"
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise WorkloadError(
            f"tp = {tp} neither divides nor is a multiple of the {model.kv_heads} key/value heads of {model.id}"
        )
    space = model.state_space
    if space and (space.heads % tp or (space.groups % tp and tp % space.groups)):
        raise WorkloadError(
            f"tp = {tp} does not divide the {space.heads} state-space heads of {model.id} in {space.groups} groups"
        )
    if layout.ep == 1 and model.d_ff % tp:  # with ep ranks hold whole experts
        raise WorkloadError(f"tp = {tp} does not divide d_ff = {model.d_ff} of {model.id}")


def _check_experts(model: ModelSpec, layout: Layout, copies: int | None) -> None:
    """Refuse degrees of experts and attention that no mode of the records describes."""
    mode, tp, ep = layout.ep_mode, layout.tp, layout.ep
    if mode not in (None, "all_reduce", "all_to_all"):
        raise WorkloadError(f"ep_mode = {mode!r}: known are 'all_reduce', 'all_to_all'")
    if ep > 1 and mode is None:
        raise WorkloadError(f"ep = {ep} needs ep_mode: 'all_reduce' or 'all_to_all'")
    if mode is not None and ep == 1:
        raise WorkloadError(f"ep_mode = '{mode}' needs ep of at least 2")
    if ep > 1 and mode == "all_to_all" and ep % tp:
        raise WorkloadError(
            f"ep = {ep} with tp = {tp}: tensor groups must fill an expert group: use tp = {_divisors(ep)}"
        )
    if ep > 1 and mode == "all_reduce" and tp not in (1, ep):
        raise WorkloadError(f"ep = {ep} with tp = {tp}: tp must be 1 or equal to ep in ep_mode 'all_reduce'")
    if ep > 1 and not model.experts:
        raise WorkloadError(f"ep = {ep}: {model.id} has no experts: use tp")
    if layout.ep_kernels is not None and mode != "all_to_all":
        raise WorkloadError(
            f"ep_kernels = '{layout.ep_kernels}' needs ep_mode = 'all_to_all': tokens that travel to experts"
        )
    if layout.dispatch_dtype is not None and layout.ep_kernels is None:
        raise WorkloadError(f"dispatch_dtype = '{layout.dispatch_dtype}' needs ep_kernels: low_latency or normal")
    if model.experts and ep > 1 and model.experts % ep and copies is None:  # copies must fill the ranks themselves
        raise WorkloadError(
            f"ep = {ep} does not divide the {model.experts} experts of {model.id}: use {_divisors(model.experts)}"
        )


def _check_batch(layout: Layout, batch: int) -> None:
    """Replicas and micro-batches divide whole sequences."""
    dp, parts = layout.dp, layout.micro_batches
    if batch % dp:
        raise WorkloadError(f"dp = {dp} does not divide batch = {batch}: use {_divisors(batch)}")
    if parts > 1 and layout.pp == 1:
        raise WorkloadError(f"micro_batches = {parts} needs pp of at least 2: without stages there is nothing to fill")
    if (batch // dp) % parts:
        raise WorkloadError(
            f"micro_batches = {parts} does not divide the {batch // dp} sequences of a replica: "
            f"use {_divisors(batch // dp)}"
        )


def _check_context(model: ModelSpec, layout: Layout, *, batch: int, new_tokens: int) -> None:
    """Ulysses splits rows outside attention and heads inside it, a ring rows alone."""
    cp = layout.cp
    if model.state_space:
        raise WorkloadError(f"cp = {cp}: states of {model.id} pass from token to token: use cp = 1")
    if layout.sequence_parallel:
        raise WorkloadError(f"cp = {cp} with sequence_parallel: both split the tokens of a layer: use one of them")
    if layout.cp_mode != "ulysses":
        if model.v_head_dim:
            raise WorkloadError(
                f"cp_mode = '{layout.cp_mode}': heads of {model.id} have values of another size than keys"
            )
        _check_ring(layout, new_tokens=new_tokens)
        return
    _check_heads(model, layout)
    if new_tokens > 1 and new_tokens % cp:
        raise WorkloadError(f"cp = {cp} does not divide the {new_tokens} tokens of a sequence: use a multiple of {cp}")
    sequences = batch // (layout.dp * layout.micro_batches)
    if new_tokens == 1 and sequences % cp:
        raise WorkloadError(
            f"cp = {cp} does not divide the {sequences} sequences that a decode step runs at once: "
            f"use {_divisors(sequences)}"
        )


def _check_heads(model: ModelSpec, layout: Layout) -> None:
    """Heads that ranks of a context group take in exchange for tokens."""
    cp, heads = layout.cp, model.q_heads // layout.tp
    if heads % cp:
        raise WorkloadError(
            f"cp = {cp} does not divide the {heads} query heads of a rank of {model.id}: use {_divisors(heads)}"
        )
    kv_heads = max(1, model.kv_heads // layout.tp)
    if kv_heads % cp and cp % kv_heads:
        raise WorkloadError(
            f"cp = {cp} neither divides nor is a multiple of the {kv_heads} key/value heads of a rank of {model.id}"
        )


def check_served(
    model: ModelSpec, layout: Layout, *, layers: int | None = None, expert_copies: int | None = None
) -> None:
    """:func:`check_layout` of a server's replica, whose steps are as large as they come; its caches may be spread."""
    _check_degrees(layout)
    alone = replace(layout, cp=1, dcp=1, dp=1, micro_batches=1)
    check_layout(model, alone, batch=1, new_tokens=1, layers=layers, expert_copies=expert_copies)
    if layout.cp > 1 and layout.cp_mode not in ("ulysses", "all_gather"):
        raise WorkloadError(
            f"cp_mode = '{layout.cp_mode}': rounds of a ring are known for a prompt by itself, not for a server's "
            "steps: use cp_mode = 'all_gather' or 'ulysses'"
        )
    if layout.cp > 1 and layout.dcp > 1:
        raise WorkloadError(f"cp = {layout.cp} with dcp = {layout.dcp}: both spread caches: use one of them")
    for one in map(model.of, model.blocks):
        if layout.cp > 1 and layout.cp_mode == "ulysses":
            _check_heads(one, layout)
        if layout.dcp > 1:
            _check_shards(one, layout)
    if layout.cp > 1 and layout.cp_mode == "ulysses" and model.latent:
        raise WorkloadError(
            f"cp_mode = 'ulysses': the latents of {model.id} have no heads to exchange: use cp_mode = 'all_gather'"
        )


def cache_copies(model: ModelSpec, tp: int) -> int:
    """Ranks of a tensor group that hold the same keys and values, or latents."""
    return tp if model.latent else max(1, tp // model.kv_heads)


def _check_shards(model: ModelSpec, layout: Layout) -> None:
    """``dcp`` ranks share out the keys and values that they would all hold, as in vLLM's check of GQA models."""
    copies = cache_copies(model, layout.tp)
    if copies % layout.dcp:
        heads = "the latents" if model.latent else f"each of the {model.kv_heads} key/value heads"
        raise WorkloadError(
            f"dcp = {layout.dcp}: with tp = {layout.tp}, {copies} {'ranks hold' if copies > 1 else 'rank holds'} "
            f"{heads} of {model.id}: use {_divisors(copies)}, or a larger tp"
        )


def _check_ring(layout: Layout, *, new_tokens: int) -> None:
    """Blocks of keys travel while a prompt is read: one a rank, or two halves under zigzag."""
    cp, mode = layout.cp, layout.cp_mode
    parts = 2 * cp if mode == "zigzag" else cp
    if new_tokens == 1:
        raise WorkloadError(f"cp_mode = '{mode}' is for phase 'prefill': decode with cp_mode = 'ulysses'")
    if new_tokens % parts:
        raise WorkloadError(
            f"cp = {cp} with cp_mode = '{mode}' cuts a sequence in {parts} parts, which do not divide its "
            f"{new_tokens} tokens: use a multiple of {parts}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 128) + 1) if number % d == 0)
