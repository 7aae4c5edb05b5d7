"""What a framework makes of a training step that ours at its best does not: ``workloads/data/stacks``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from workloads.kernel_names import Elementwise
from workloads.kernels import elementwise_kernel
from workloads.program import Kernel, Segment
from workloads.work import AttentionWork, DType, ElementwiseWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Attention by the ``attention`` kernels of another stack, over ``all_keys`` whatever the mask; gradients summed in
    ``sum_bytes`` a weight, of which passes before and after move more; weights gathered ``ahead_in_backward`` or when
    they are wanted; and passes of autograd, in bytes for each token and unit of width."""

    attention: str | None = None
    all_keys: bool = False
    sum_bytes: int = int(DType.BF16.bytes)
    before_sum_bytes: int = 0
    after_sum_bytes: int = 0
    ahead_in_backward: bool = True
    attention_bytes: int = 0
    layernorm_bytes: int = 0

    def attends(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Forward layers with this framework's attention."""
        if self.attention is None:
            return tuple(segments)
        return tuple(
            replace(segment, kernels=tuple(self._attending(one) for one in segment.kernels)) for segment in segments
        )

    def _attending(self, kernel: Kernel) -> Kernel:
        work = kernel.work
        if not isinstance(work, AttentionWork):
            return kernel
        whole = replace(work, engine=self.attention, causal=work.causal and not self.all_keys)
        return replace(kernel, work=whole, flops=kernel.flops * whole.pairs / work.pairs)

    def passes(self, kernel: Kernel, width: int) -> Iterator[Kernel]:
        """What runs beside the gradients of a forward ``kernel``."""
        match kernel.work:
            case AttentionWork(batch=batch, q_len=tokens) if self.attention_bytes:
                rows, moved = batch * tokens, self.attention_bytes
            case ElementwiseWork(op=Elementwise.LAYERNORM, rows=rows) if self.layernorm_bytes:
                moved = self.layernorm_bytes
            case _:
                return
        yield elementwise_kernel(f"{kernel.name}_passes", Elementwise.COPY, rows, width, moved * rows * width)


@lru_cache(maxsize=8)
def load_framework(name: str | None) -> Framework:
    """A framework by the name of its file; None: ours at its best.

    >>> load_framework("llm-foundry").sum_bytes
    4
    """
    if name is None:
        return Framework()
    path = files("workloads") / "data" / "stacks" / f"{name}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return Framework(
        attention=table["attention"]["kernel"],
        all_keys=table["attention"]["all_keys"],
        **table["weights"],
        **{f"{name}_bytes": moved for name, moved in table["gradients"].items()},
    )
