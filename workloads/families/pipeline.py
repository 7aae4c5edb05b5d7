"""Pipeline stages: which layers a stage runs, in which order micro-batches pass, what travels between stages.

``gpipe`` posts its receives ahead on a stream of their own, as the measured pipeline does: transfers hide, but
a receive that waits holds SMs beside the stage's compute. Each step ends when all its micro-batches have.
``1f1b`` keeps one micro-batch in flight a stage: receive, compute, send in one stream. Nothing waits beside
compute, transfers are exposed, and a stage starts a micro-batch's next token as soon as its last one is back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, elementwise_kernel
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange, RankSplit, SampleToken, StageEnd
from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.placement import stage_pairs
from workloads.program import Kernel, Segment
from workloads.work import CollectiveWork, DType

# Streams of transfers between stages; 0 computes, 1 is for collectives that overlap.
SEND_STREAM, RECEIVE_STREAM = 2, 3
TRANSFER_PRIORITY = -1  # lower runs first, as in CUDA
# Tokens on their way back to the first stage.
(TOKENS,) = (one for one in shard((SampleToken(), StageEnd(name="token")), returns=False) if isinstance(one, Exchange))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """One pass of all micro-batches, each of ``sequences``, through one stage.

    ``previous`` is the step before it, if tokens come back; ``returns`` says that its own tokens do.
    """

    shape: Shape
    sequences: int
    stage: int
    label: str
    previous: str | None
    returns: bool

    @property
    def first(self) -> bool:
        """True on the stage that takes tokens in."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True on the stage that has the head."""
        return self.stage == self.shape.layout.pp - 1

    def mark(self, event: str, part: int) -> str:
        """The name of an event of one micro-batch."""
        return f"{self.label}: {event} {part}"


def stage_segments(step: StagePass, compute: Sequence[Segment]) -> Iterator[Segment]:
    """``compute`` once a micro-batch, with receives before and sends after; alone where there is one stage."""
    layout = step.shape.layout
    if layout.pp == 1:
        yield from compute
        return
    parts = range(layout.micro_batches)
    ahead = layout.pp_schedule == "gpipe"
    if ahead and not step.first:
        for part in parts:
            yield _receive(step, part, ahead=True)
    if ahead and step.first and step.previous is not None:
        tokens = tuple(_token(step, "receive_token") for _ in parts)
        yield Segment(name="receive tokens", kernels=tokens)
    for part in parts:
        if not ahead and not step.first:
            yield _receive(step, part, ahead=False)
        if not ahead and step.first and step.previous is not None:
            yield Segment(name=f"receive token {part}", kernels=(_token(step, "receive_token"),))
        own = [replace(kernel, name=f"micro-batch {part} {kernel.name}") for kernel in compute]
        if ahead and not step.first:
            own[0] = replace(own[0], waits=(step.mark("received", part),))
        if ahead and not step.last:
            own.append(Segment(name=f"micro-batch {part} hand over", kernels=(_copy_out(step.shape),)))
        own[-1] = replace(own[-1], mark=step.mark("computed", part))
        yield from own
        if not step.last:
            yield _send(step, part, ahead=ahead)
        elif step.returns:
            token = _token(step, "send_token", stream=SEND_STREAM)
            yield Segment(
                name=f"send token {part}",
                kernels=(token,),
                waits=(step.mark("computed", part),),
                asynchronous=True,
            )


def handed_on(shape: Shape) -> int:
    """Bytes of a micro-batch that one rank hands to the next stage: the residual stream as ranks hold it."""
    (boundary,) = shard((StageEnd(),), RankSplit.of(shape.layout), returns=False)
    assert isinstance(boundary, Exchange)
    return boundary.elements(shape.local_sizes(boundary.parallel)) * boundary.element_bytes


def stage_bytes(model: ModelSpec, layout: Layout, tokens: int) -> int:
    """Bytes that one rank hands to the next stage after a step of ``tokens``."""
    return handed_on(Shape(model=model, layout=layout, batch=tokens, new_tokens=1, context=1))


def _send(step: StagePass, part: int, *, ahead: bool) -> Segment:
    pair = stage_pairs(step.shape.layout)[step.stage]
    kernel = _transfer("send", pair, handed_on(step.shape), stream=SEND_STREAM if ahead else 0)
    waits = (step.mark("computed", part),) if ahead else ()
    return Segment(name=f"send {part}", kernels=(kernel,), waits=waits, asynchronous=ahead)


def _receive(step: StagePass, part: int, *, ahead: bool) -> Segment:
    pair = stage_pairs(step.shape.layout)[step.stage - 1]
    kernel = _transfer("receive", pair, handed_on(step.shape), stream=RECEIVE_STREAM if ahead else 0)
    waits: tuple[str, ...] = ()
    if ahead and part == 0 and step.previous is not None:
        # A step's receives are posted when the step begins, not while the last one still computes.
        waits = (f"{step.previous}: computed {step.shape.layout.micro_batches - 1}",)
    mark = step.mark("received", part) if ahead else None
    return Segment(name=f"receive {part}", kernels=(kernel,), mark=mark, waits=waits, asynchronous=ahead)


def _token(step: StagePass, name: str, *, stream: int = 0) -> Kernel:
    """The ids of a micro-batch on their way back to the first stage; they fit in one block."""
    pair = stage_pairs(step.shape.layout)[-1]
    size = TOKENS.elements({"b": step.sequences, "s": 1}) * TOKENS.element_bytes
    return _transfer(name, pair, size, stream=stream, ctas=1)


def _transfer(name: str, pair: tuple[int, int], buffer: int, *, stream: int = 0, ctas: int | None = None) -> Kernel:
    return Kernel(
        name=name,
        work=CollectiveWork(op=TOKENS.op, ranks=pair, buffer_bytes=buffer, ctas=ctas),
        flops=0.0,
        bytes_moved=float(buffer),
        stream=stream,
        priority=TRANSFER_PRIORITY if stream else 0,
    )


def _copy_out(shape: Shape) -> Kernel:
    """The last layer's output goes to a buffer that the next micro-batch does not touch."""
    moved = handed_on(shape)
    rows = moved // (shape.model.d_model * DType.BF16.bytes)
    return elementwise_kernel("copy_out", Elementwise.COPY, rows, shape.model.d_model, 2 * moved)
