"""The report of a simulated run: ``wattline simulate --report run.html``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sim.engine.running import HeldClock
from sim.explore.choice import command_of
from sim.output.files import write_atomically
from sim.pages import basis, figures
from sim.pages.page import Page, Section, TextTable, html
from sim.pages.sums import KernelSum, binned, kernel_sums, split_of
from sim.result.rates import generation, held_bytes, rates, utilisation
from sim.result.report import count, duration, extent, headline, share, simulated, status_text
from sim.result.timeline import Timeline
from sim.result.trace import release

# Bins of the pictures over time: a line of more points than a screen has.
BINS = 1200
TOP_KERNELS = 15


def write_report(run: Timeline, path: Path) -> None:
    """Write ``run`` as one HTML page that needs no network; a :class:`SimError` where that cannot be done."""
    write_atomically(path, html(run_page(run, path.name)).encode())


def run_page(run: Timeline, name: str = "run.html") -> Page:
    """The page of ``run``; ``name`` is the file's, for the command at its end."""
    scenario, outcome, gpu = run.scenario, run.outcome, run.machine.gpu
    bins, sums = binned(outcome, BINS), kernel_sums(outcome)
    shown, kinds = figures.shown_gpus(run), len(outcome.folding.classes)
    some = f" {len(shown)} of {kinds} kinds of GPUs are drawn, from the least energy to the most." * (
        len(shown) < kinds
    )
    cap = " Power may pass the cap for a moment: the cap holds the mean over a second, a faster limiter the peak."
    cap *= bool(np.isfinite(run.machine.limits.cap_w))
    bin_s = float(bins.edges_s[1])
    width, stack_width = duration(bin_s), duration(bin_s * (figures.TREND if figures.smoothed(run) else 1))
    sections = [
        Section(
            title="Power, clock and energy over time",
            figures=[figures.over_time(run, bins, shown)],
            note=f"Faint: means over {width}; bold: over {figures.TREND} times that.{cap}{some}",
        ),
        Section(
            title="Where the joules go",
            figures=[figures.by_class_over_time(run, bins), figures.by_class(sums, run.sums_by("phase")["idle"][0])],
            note=f"All GPUs, means over {stack_width}. A kernel's joules are spread over the time it runs, and at "
            "every moment the classes add up to the power drawn.",
        ),
        Section(
            title="Roofline of the kernels",
            figures=[figures.roofline(run, sums)],
            note="A marker is a kernel of one phase, by its number in the table below; its area is its share of GPU "
            "time. Dotted: the datasheet's peaks. Solid: the same cores at this run's mean clock, and the HBM "
            "bandwidth that kernels were measured to get. Attention counts what its mask leaves; kernels without "
            "arithmetic are left out.",
        ),
        Section(title="Top kernels", table=_top(sums, run), note=_rest(sums)),
        Section(title="What these numbers rest on", table=_basis(run)),
        *basis.details(run.machine, scenario),
    ]
    if run.gpus > 1:
        sections.insert(2, _communication(run))
    return Page(
        title=f"{scenario.model} {scenario.phase} on {run.gpus} x {gpu.id}",
        lead=headline(run),
        tiles=_tiles(run),
        sections=sections,
        command=f"{command_of(scenario)} --report {name}",
        made_by=f"wattline {release()}",
    )


def _tiles(run: Timeline) -> list[tuple[str, str, str]]:
    seen, used, held = rates(run), utilisation(run), held_bytes(run)
    tokens = f"{run.energy_j / run.tokens:.4g} J a token"
    alone_s = run.exposed_communication_s
    tiles = [
        ("latency", duration(run.latency_s), simulated(run)),
        ("energy, all GPUs", f"{run.energy_j:.4g} J", tokens),
        ("tokens a second", count(seen["tokens_per_s"]), f"{count(seen['tokens_per_s_per_gpu'])} a GPU"),
        ("memory a GPU", f"{held / 1e9:.1f} GB", f"of {run.machine.gpu.memory_bytes / 1e9:.0f}"),
        ("MFU, MBU", f"{share(used['mfu'])}, {share(used['mbu'])}", "of the datasheet's rates"),
        ("mean power a GPU", extent(run.power_w_per_gpu, 1.0, "W"), f"TDP {run.machine.gpu.tdp_w:g} W"),
        (
            "mean SM clock",
            extent(run.sm_clock_hz_per_gpu, 1e6, "MHz"),
            f"at most {run.machine.model.max_clock_hz / 1e6:g}",
        ),
    ]
    if run.gpus > 1:
        tiles.append(("exposed communication", duration(alone_s), f"{alone_s / run.latency_s:.1%} of the run"))
    if run.scenario.phase == "generate":
        parts = generation(run)
        tiles += [
            ("time to first token", duration(parts["ttft_s"]), f"{parts['energy_to_first_token_j']:.4g} J"),
            ("time an output token", duration(parts["tpot_s"]), f"{run.energy_j / run.scenario.batch:.4g} J a request"),
        ]
    return [*tiles, ("kernels", f"{run.outcome.kernels:,}", "launches on all GPUs")]


def _communication(run: Timeline) -> Section:
    kinds = run.exposed_and_waiting_s
    rows = [[kind, duration(exposed_s), duration(waiting_s)] for kind, (exposed_s, waiting_s) in kinds.items()]
    return Section(
        title="Communication, hidden and exposed",
        figures=[figures.gpu_time(split_of(run.outcome, kinds), run.latency_s)],
        table=TextTable(head=["collective", "exposed", "waiting"], rows=rows),
        note="Mean over GPUs. Exposed: data moves and nothing computes. Waiting: the rank is there, the last one is "
        "not, and nothing else runs.",
    )


def _top(sums: Sequence[KernelSum], run: Timeline) -> TextTable:
    busy_s = sum(row.time_s for row in sums)
    phases = len({row.phase for row in sums}) > 1
    rows = [
        [
            str(number),
            f"{row.name} ({row.phase})" if phases else row.name,
            row.family + " *" * row.extrapolated,
            f"{row.launches:,}",
            duration(row.time_s / row.launches),
            f"{row.time_s / busy_s:.1%}",
            f"{row.energy_j:.4g}",
            f"{row.energy_j / run.energy_j:.1%}",
            f"{row.energy_j / row.time_s:.0f}",
            f"{row.flops / row.time_s * 1e-12:.3g}" if row.flops else "",
            f"{row.hbm_bytes / row.time_s * 1e-9:,.0f}" if row.hbm_bytes else "",
            _shape(row),
        ]
        for number, row in enumerate(sums[:TOP_KERNELS], start=1)
    ]
    shares = ["mean time", "GPU time", "J", "energy", "W", "TFLOP/s", "GB/s", "sizes"]
    return TextTable(
        head=["", "kernel", "class", "launches", *shares], rows=rows, words=(1, 2, 11), minor=(2, 3, 5, 8, 9, 10, 11)
    )


def _rest(sums: Sequence[KernelSum]) -> str:
    others = sums[TOP_KERNELS:]
    text = "Sorted by joules; launches, joules and shares are of all GPUs, rates of one."
    if others:
        text += f" Left out: {len(others)} kernels of {sum(row.energy_j for row in others):.3g} J together."
    if any(row.extrapolated for row in sums):
        text += " * outside the measured range."
    return text


def _shape(row: KernelSum) -> str:
    """Sizes as they were met: one value, or the least and the greatest."""
    sizes = {}
    for name, values in row.sizes.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if numbers and name not in ("flops", "count", "blocks", "bytes_moved"):
            low, high = min(numbers), max(numbers)
            sizes[name] = f"{low}" if low == high else f"{low} to {high}"
    product = [sizes.pop(name) for name in ("m", "n", "k") if name in sizes]
    words = [f"{name.replace('_', ' ')} {value}" for name, value in sizes.items()]
    return ", ".join([" x ".join(product), *words] if product else words)


def _basis(run: Timeline) -> TextTable:
    machine, outcome = run.machine, run.outcome
    outside = outcome.extrapolated_kernels
    cap_w = machine.limits.cap_w
    steady = (
        "the work is repeated until the power cap has settled"
        if run.scenario.regime == "steady"
        else "one shot from a cool, idle GPU"
    )
    why = f" ({outcome.why})" if outcome.why else ""
    rows = [
        ["status", status_text(run)],
        *basis.profile_rows(machine.profile),
        ["power", f"cap {f'{cap_w:g} W' if np.isfinite(cap_w) else 'off'}; {_limited(run)}"],
        ["regime", f"{run.scenario.regime}: {steady}"],
        [
            "chips",
            f"{_chips(run)}; on several GPUs matrix products and attention go at the expected pace of the slowest",
        ],
        ["detail", f"{outcome.detail}: {simulated(run)}{why}"],
        ["outside the measured range", ", ".join(outside) or "no kernel"],
    ]
    if outcome.context_buckets:
        rows.append(
            [
                "decode steps",
                f"on {outcome.context_buckets} contexts, off by {outcome.context_bucket_error:.2%} at most",
            ]
        )
    return TextTable(head=[], rows=rows, words=(0, 1))


def _chips(run: Timeline) -> str:
    factor = run.scenario.chip_power_factor
    return "the mean chip" if factor is None else f"power above idle {factor:g} times the profile's"


def _limited(run: Timeline) -> str:
    """Where the limiters settled or stood at the end."""
    if any(isinstance(target, HeldClock) for target in run.targets):
        text = f"the limiters settled at {extent(run.clock_limit_hz, 1e6, 'MHz')}"
        mean_hz, most_hz = np.array(run.sm_clock_hz_per_gpu), np.array(run.clock_limit_hz)
        return f"{text}, lower where power passes a faster limit" if (mean_hz < 0.999 * most_hz).any() else text
    if not np.isfinite(run.power_limit_w).all():
        return "clocks yield to no power"
    return f"at the end clocks yielded to {extent(run.power_limit_w, 1.0, 'W')}"
