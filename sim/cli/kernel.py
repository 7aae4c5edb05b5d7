"""``wattline kernel``: one kernel at any clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from sim.cli.help import HelpGroup, complete_gpu
from sim.cli.options import TypeName

if TYPE_CHECKING:
    from workloads.work import Work


# Bytes that a kernel over 16-bit elements reads and writes for each of them.
PER_ELEMENT = {
    "copy": 4, "permute_copy": 4, "add_rmsnorm": 8, "rmsnorm": 4, "layernorm": 4, "softmax": 4, "silu_mul": 6,
    "gelu": 4, "add": 6, "cast_fp8": 3,
}  # fmt: skip


@click.group("kernel", cls=HelpGroup)
def command() -> None:
    """Tiles, waves, utilisation, latency, power and energy of one kernel, and its cheapest clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """The GPU that a kernel runs on, its clock and cap, and what is printed."""

    gpu: str
    sm_clock_mhz: float | None
    power_cap_w: float | None
    sweep: bool
    as_json: bool


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options that all kernels share, which ``command`` gets as one ``setting``."""

    @wraps(command)
    def function(**given: Any) -> None:
        setting = _Setting(**{field.name: given.pop(field.name) for field in fields(_Setting)})
        command(setting=setting, **given)

    for option in (
        click.option(
            "--gpu",
            default="h100-sxm-80gb",
            show_default=True,
            help="GPU id (wattline gpus) or .toml file",
            shell_complete=complete_gpu,
        ),
        click.option("--sm-clock", "sm_clock_mhz", type=float, help="locked SM clock, MHz"),
        click.option("--power-cap-w", type=float, help="power limit [default: TDP]"),
        click.option("--sweep", is_flag=True, help="print every clock in 90 MHz steps"),
        click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout"),
    ):
        function = option(function)
    return function


@command.command("gemm")
@click.option("--m", type=click.IntRange(1), required=True, help="rows of the product")
@click.option("--n", type=click.IntRange(1), required=True, help="columns of the product")
@click.option("--k", type=click.IntRange(1), required=True, help="length of the sums")
@click.option(
    "--dtype",
    type=TypeName(["bf16", "fp16", "fp8_e4m3", "int8", "fp32"]),
    default="bf16",
    show_default=True,
    help="type of the operands",
)
@click.option(
    "--weight-dtype", help="how weights are stored: int4_g128, fp8_e4m3_block128, nvfp4, ... [default: dtype]"
)
@_common
def gemm(m: int, n: int, k: int, dtype: str, weight_dtype: str | None, setting: _Setting) -> None:
    """A matrix product, (m x k) by (k x n), weights stored n x k."""
    from workloads.precision import resolve
    from workloads.storage import storage
    from workloads.work import DType, GemmWork

    out_dtype = DType.FP32 if dtype == "fp32" else DType.BF16
    kept = resolve(dtype=DType(dtype), weights=None if weight_dtype is None else storage(weight_dtype)).product
    _show(GemmWork(m=m, n=n, k=k, dtype=kept.multiplies, out_dtype=out_dtype, weights=kept.stored), setting)


@command.command("grouped")
@click.option("--tokens", type=click.IntRange(1), required=True, help="rows before they are routed")
@click.option("--experts", type=click.IntRange(1), required=True, help="experts to choose from")
@click.option("--top-k", type=click.IntRange(1), required=True, help="experts that each token chooses")
@click.option("--n", type=click.IntRange(1), required=True, help="columns of the product")
@click.option("--k", type=click.IntRange(1), required=True, help="length of the sums")
@click.option("--routing", default="uniform", show_default=True, help="as in simulate: zipf:S, gini:G, ...")
@_common
def grouped(tokens: int, experts: int, top_k: int, n: int, k: int, routing: str, setting: _Setting) -> None:
    """One product, (rows x k) by (k x n), for each expert that tokens chose, in one kernel."""
    import workloads
    from workloads.routing import Choice
    from workloads.work import GroupedGemmWork

    if top_k > experts:
        raise click.UsageError(f"top-k = {top_k} is more than experts = {experts}")
    law = workloads.Routing(popularity=workloads.parse_popularity(routing))
    choice = Choice(experts=experts, top_k=top_k)
    (load,) = workloads.expert_loads(tokens=tokens, choice=choice, routing=law, ranks=1)
    sizes = {name: value for name, value in asdict(load).items() if name != "small_tiles"}
    work = GroupedGemmWork(experts=experts, n=n, k=k, **sizes)
    _show(work, setting)


@command.command("attention")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="sequences")
@click.option("--seq-len", type=click.IntRange(1), required=True, help="keys: prompt length, or cached tokens")
@click.option("--decode", is_flag=True, help="one query token a sequence instead of seq-len")
@click.option("--q-heads", type=click.IntRange(1), default=32, show_default=True, help="query heads")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="heads of keys and values")
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True, help="elements of a head")
@click.option("--causal/--no-causal", default=True, show_default=True, help="mask what comes later")
@_common
def attention(
    batch: int, seq_len: int, decode: bool, q_heads: int, kv_heads: int, head_dim: int, causal: bool, setting: _Setting
) -> None:
    """Flash attention, prefill or decode."""
    from workloads.work import AttentionWork

    if q_heads % kv_heads:
        raise click.UsageError(f"q-heads = {q_heads} is not a multiple of kv-heads = {kv_heads}")
    work = AttentionWork(
        batch=batch,
        q_len=1 if decode else seq_len,
        kv_len=seq_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal and not decode,
    )
    _show(work, setting)


@command.command("elementwise")
@click.option("--op", type=click.Choice(sorted(PER_ELEMENT)), required=True, help="what it does")
@click.option("--rows", type=click.IntRange(1), required=True, help="rows")
@click.option("--width", type=click.IntRange(1), required=True, help="elements of a row")
@_common
def elementwise(op: str, rows: int, width: int, setting: _Setting) -> None:
    """A memory-bound kernel over rows x width 16-bit elements."""
    from workloads.kernel_names import Elementwise
    from workloads.work import ElementwiseWork

    moved = PER_ELEMENT[op] * rows * width
    _show(ElementwiseWork(op=Elementwise(op), rows=rows, width=width, bytes_moved=moved), setting)


@command.command("collective")
@click.option(
    "--op",
    type=click.Choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv_ring", "broadcast"]),
    required=True,
    help="operation, as libraries name it",
)
@click.option("--bytes", "size", type=click.IntRange(1), required=True, help="full buffer, as in the records")
@click.option("--world", type=click.IntRange(2), required=True, help="ranks")
@click.option("--ctas", type=click.IntRange(1, 128), help="blocks [default: the library's choice]")
@click.option(
    "--algorithm",
    type=click.Choice(["library", "ring", "tree", "one_shot", "two_shot", "nvls", "auto"]),
    default="library",
    show_default=True,
    help="way of an all_reduce",
)
@_common
def collective(op: str, size: int, world: int, ctas: int | None, algorithm: str, setting: _Setting) -> None:
    """A collective in a bare loop, per rank; a world beyond one node goes over its NICs."""
    from workloads.kernel_names import AllReduce, CollectiveOp
    from workloads.work import CollectiveWork

    if algorithm != "library" and op != "all_reduce":
        raise click.UsageError(f"--algorithm {algorithm}: only an all_reduce has several ways, not {op}")
    work = CollectiveWork(
        op=CollectiveOp(op), ranks=tuple(range(world)), buffer_bytes=size, ctas=ctas, algorithm=AllReduce(algorithm)
    )
    _show(work, setting, world=world)


def _exchange(function: Callable[..., Any]) -> Callable[..., Any]:
    """The sizes of an exchange with experts."""
    for option in reversed(
        (
            click.option("--world", type=click.IntRange(2, 4096), required=True, help="ranks that hold the experts"),
            click.option("--tokens", type=click.IntRange(1), required=True, help="tokens of each rank"),
            click.option("--hidden", type=click.IntRange(1), required=True, help="elements of a token"),
            click.option("--top-k", type=click.IntRange(1, 1024), required=True, help="experts of a token"),
            click.option(
                "--dtype",
                type=click.Choice(["bf16", "fp16", "fp8_e4m3"]),
                default="bf16",
                show_default=True,
                help="type that tokens are sent in",
            ),
            click.option(
                "--ep-kernels",
                type=click.Choice(["low_latency", "normal"]),
                default="low_latency",
                show_default=True,
                help="kernels for few tokens at once, or for many",
            ),
        )
    ):
        function = option(function)
    return function


@command.command("dispatch")
@_exchange
@_common
def dispatch(world: int, setting: _Setting, **sizes: Any) -> None:
    """Tokens to their experts on other GPUs, as DeepEP's kernels send them; per rank."""
    _show_exchange("dispatch", world, setting, **sizes)


@command.command("combine")
@_exchange
@_common
def combine(world: int, setting: _Setting, **sizes: Any) -> None:
    """What experts made of tokens, back and added up, as DeepEP's kernels do; per rank."""
    _show_exchange("combine", world, setting, **sizes)


def _show_exchange(op: str, world: int, setting: _Setting, *, dtype: str, ep_kernels: str, **counts: Any) -> None:
    from workloads.kernel_names import CollectiveOp, EpKernels
    from workloads.work import CollectiveWork, DType, ExchangeSizes

    sizes = ExchangeSizes(dtype=DType(dtype), kernels=EpKernels(ep_kernels), **counts)
    buffer_bytes = sizes.tokens * sizes.top_k * sizes.hidden * int(sizes.dtype.bytes)
    work = CollectiveWork(op=CollectiveOp(op), ranks=tuple(range(world)), buffer_bytes=buffer_bytes, exchange=sizes)
    _show(work, setting, world=world)


def _show(work: Work, setting: _Setting, *, world: int = 1) -> None:
    from rich.table import Table

    from sim.cli.console import wide_console
    from sim.explore.kernel import kernel_report, unmeasured
    from sim.result.status import standing_of_laws
    from sim.scenario.machine import Policy, machine

    policy = Policy(power_cap_w=setting.power_cap_w, sm_clock_mhz=setting.sm_clock_mhz)
    target = machine(setting.gpu, world, policy)
    report = kernel_report(target, work)
    rests_on = standing_of_laws(target, outside=report.extrapolated, unmeasured=unmeasured(target, work))
    if setting.as_json:
        click.echo(json.dumps(report.as_json() | rests_on.as_json(), allow_nan=False))
        return
    console = wide_console()
    shape = f"{report.blocks} blocks, {report.waves:.4g} waves{report.way and f', {report.way}'}"
    console.print(f"{report.gpu}: {shape}; {rests_on.words()}")
    table = Table()
    for name in ("", "SM MHz", "latency us", "power W", "energy mJ", "tensor %", "HBM %", "SMs %", "beyond"):
        table.add_column(name, justify="right" if name else "left")
    rows = [("settled", report.settled), ("least energy", report.best)]
    if setting.sweep:
        rows += [("", point) for point in report.sweep]
    for label, point in rows:
        table.add_row(
            label,
            f"{point.sm_clock_hz / 1e6:.0f}",
            f"{point.latency_s * 1e6:.4g}",
            f"{point.power_w:.0f}",
            f"{point.energy_j * 1e3:.4g}",
            f"{100 * point.tensor_utilisation:.0f}",
            f"{100 * point.hbm_utilisation:.0f}",
            f"{100 * point.sm_utilisation:.0f}",
            point.beyond,
        )
    console.print(table)
