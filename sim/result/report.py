"""What a run says about itself: one dictionary for machines, one table for people."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import workloads
from sim.build.program import routing_of
from sim.output.console import PlainConsole, visible
from sim.result.prices import NO_PRICES, Prices
from sim.result.rates import costs, memory, multiplied_type, rates, times, utilisation
from sim.result.run import Run
from sim.scenario.layout import layout_of
from sim.scenario.memory import MemoryUse
from sim.scenario.positions import positions
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.speculation import acceptances
from sim.scenario.video import model_of, video_summary


def summary(run: Run, prices: Prices = NO_PRICES) -> dict[str, Any]:
    """Headline figures in SI units, energy by kernel class and phase, and what they rest on; cost where priced."""
    result: dict[str, Any] = {
        "scenario": run.scenario.model_dump(),
        "model": model_of(run.scenario).id,
        "gpu": run.machine.gpu.id,
        **run.standing.as_json(),
        "latency_s": run.latency_s,
        "energy_j": run.energy_j,
        "energy_j_per_gpu": list(run.energy_j_per_gpu),
        "energy_j_per_token": run.energy_j / run.tokens,
        "tokens": run.tokens,
        "power_w_per_gpu": list(run.power_w_per_gpu),
        "sm_clock_hz_per_gpu": list(run.sm_clock_hz_per_gpu),
        "power_target_w_per_gpu": [x if x < 1e9 else None for x in run.power_limit_w],
        "clock_limit_hz_per_gpu": list(run.clock_limit_hz),
        "exposed_communication_s": run.exposed_communication_s,
        "exposed_communication_by_kind": {
            kind: {"exposed_s": exposed_s, "waiting_s": waiting_s}
            for kind, (exposed_s, waiting_s) in run.exposed_and_waiting_s.items()
        },
        "bubble_s": run.bubble_s,
        "kernels": run.outcome.kernels,
        "events_kernels": run.outcome.events_kernels,
        "derived_kernels": run.outcome.derived_kernels,
        "simpy_events": run.outcome.events,
        "extrapolated_kernels": run.outcome.extrapolated_kernels,
        "detail": run.outcome.detail,
        "detail_why": run.outcome.why,
        "clock_search": asdict(run.outcome.looks),
        "positions": positions(run.scenario),
        "precision": None if run.scenario.phase == "denoise" else precision_of(run.scenario).as_json(),
        "context_buckets": run.outcome.context_buckets,
        "context_bucket_error": run.outcome.context_bucket_error,
        "energy_j_by_class": {name: energy_j for name, (energy_j, _) in run.sums_by("family").items()},
        "energy_j_by_phase": {name: energy_j for name, (energy_j, _) in run.sums_by("phase").items()},
    }
    balance = expert_balance(run.scenario)
    if balance is not None:
        result["expert_balance"] = balance
    result |= times(run) | rates(run) | {"mfu_type": multiplied_type(run.resolved)} | utilisation(run)
    result |= costs(run, prices)
    if (used := memory(run)) is not None:
        result["memory_bytes_per_gpu"] = used.as_json()
    if run.scenario.speculation is not None:
        result["tokens_per_step"] = workloads.tokens_a_step(acceptances(run.scenario))
    if run.scenario.phase == "denoise":
        result |= video_summary(run.scenario)
    return result


def expert_balance(scenario: Scenario) -> dict[str, float] | None:
    """Rows of the busiest rank's experts over the mean rank's: of this run's draw, and among 256 other seeds.

    Layers share the run's one draw; real layers differ as the seeds do. None without experts on several ranks.
    """
    if scenario.phase == "denoise":
        return None
    model = workloads.load_model(scenario.model)
    if not model.experts or scenario.ep == 1:
        return None
    if scenario.tokens_per_ep_rank is not None:
        rows = scenario.tokens_per_ep_rank
        return {"busiest_over_mean": max(rows) * len(rows) / max(sum(rows), 1)}
    layout = layout_of(scenario)
    tokens = scenario.batch * (1 if scenario.phase == "decode" else scenario.seq_len)
    tokens //= layout.dp * layout.micro_batches
    if not (layout.spreads and scenario.phase == "decode"):  # else every rank has all sequences
        tokens //= layout.cp
    tokens //= 2 if scenario.overlap == "two_batch" else 1
    tokens *= layout.own_batches
    choice, routing = workloads.choice_of(model), routing_of(scenario)
    loads = workloads.expert_loads(tokens=tokens, choice=choice, routing=routing, ranks=scenario.ep)
    low, mean, high = workloads.busiest_spread(tokens=tokens, choice=choice, routing=routing, ranks=scenario.ep)
    rows = tuple(load.rows for load in loads)
    return {
        "busiest_over_mean": max(rows) * len(rows) / max(sum(rows), 1),
        "least_of_seeds": low,
        "mean_of_seeds": mean,
        "most_of_seeds": high,
    }


def summary_text(run: Run) -> str:
    """The table of :func:`print_summary` as plain text."""
    buffer = io.StringIO()
    print_summary(run, PlainConsole(file=buffer, width=100, color_system=None))
    return buffer.getvalue().rstrip()


def headline(run: Run) -> str:
    """What was run on what, without the model's name."""
    scenario = run.scenario
    sizes = f"batch {scenario.batch}, {scenario.seq_len} tokens"
    if scenario.phase == "denoise":
        about = video_summary(scenario)
        sizes = f"{scenario.video or 'one branch'}, batch {scenario.batch}, {about['latent_tokens']} latent tokens"
    if scenario.output_len:
        sizes += f" + {scenario.output_len} generated"
    types = scenario.dtype if scenario.phase == "denoise" else precision_of(scenario).words()
    return f"{scenario.phase}, {sizes}, {types}, {run.gpus} x {run.machine.gpu.id}"


def title(run: Run) -> tuple[str, str]:
    """The model, and what was run of it on what."""
    model = model_of(run.scenario).id
    return model if model == run.scenario.model else f"{model} ({run.scenario.model})", headline(run)


def figures(run: Run, prices: Prices = NO_PRICES) -> list[tuple[str, str]]:
    """Headline figures, each with its name and units; what they cost where priced."""
    scenario, data = run.scenario, summary(run)
    rows = [("latency", duration(run.latency_s))]
    if scenario.phase == "generate":
        wh = f"  ({data['energy_wh_per_request']:.4g} Wh)"
        rows += [
            ("time to first token", duration(data["ttft_s"])),
            ("time per output token", duration(data["tpot_s"])),
            ("energy to first token", f"{data['energy_to_first_token_j']:.4g} J"),
            ("energy per request", f"{data['energy_j_per_request']:.4g} J{wh}"),
        ]
    if scenario.speculation is not None:
        rows += [
            (
                "tokens a step",
                f"{data['tokens_per_step']:.4g} a sequence  (of {scenario.draft_tokens} drafted, and one)",
            )
        ]
        rows += [("time per output token", duration(data["tpot_s"]))] if scenario.phase == "decode" else []
    rows += [
        ("energy, all GPUs", f"{run.energy_j:.4g} J  ({data['energy_j_per_token']:.4g} J per token)"),
        *prices.rows(costs(run, prices)),
        ("tokens per second", _per_second(data)),
        ("MFU, MBU", _used(data)),
        *_intensity(data),
    ]
    if "steps" in data:
        from workloads.families.dit_video import guidance_of

        steps = f"{data['steps']}, {data['computed_steps']} computed" if scenario.reuse else f"{data['steps']}"
        rows.append(("denoising steps", f"{steps}; {guidance_of(scenario.guidance)}"))
        rows.append(("memory a GPU", f"{data['memory_bytes_per_gpu'] / 1e9:.1f} GB"))
    if (used := memory(run)) is not None:
        rows.append(("memory", _held(used)))
    rows += [
        ("mean power per GPU", extent(run.power_w_per_gpu, 1.0, "W")),
        ("mean SM clock", extent(run.sm_clock_hz_per_gpu, 1e6, "MHz")),
        ("exposed communication", _exposed(run)),
    ]
    if scenario.pp > 1:
        part = f"{run.bubble_s / run.latency_s:.1%} of the run"
        rows.append(("pipeline bubbles", f"{duration(run.bubble_s)} a GPU  ({part})"))
    if "expert_balance" in data:
        rows.append(("busiest rank's expert rows", _balance(data["expert_balance"])))
    rows += [
        ("kernels", f"{run.outcome.kernels:,}"),
        ("simulated", simulated(run)),
        ("as SimPy events", by_events(run)),
    ]
    if run.outcome.context_buckets:
        off = f"off by {100 * run.outcome.context_bucket_error:.2g} % at most"
        contexts = f"on {run.outcome.context_buckets} contexts for {scenario.output_len} tokens"
        rows.append(("decode steps", f"{contexts}: {off}"))
    return [*rows, ("these numbers are", status_text(run))]


ENERGY_TITLE = "Where the joules go"
ENERGY_COLUMNS = ("kernel class", "energy J", "share", "GPU time")


def energy_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Kernel classes under :data:`ENERGY_COLUMNS`, the most joules first."""
    families = run.sums_by("family")
    whole_j = sum(energy_j for energy_j, _ in families.values())
    return [
        (name, f"{energy_j:.4g}", f"{100 * energy_j / whole_j:.1f} %", duration(duration_s))
        for name, (energy_j, duration_s) in sorted(families.items(), key=lambda item: item[1][0], reverse=True)
    ]


def print_summary(run: Run, console: Console, prices: Prices = NO_PRICES) -> None:
    """Headline table and energy by kernel class, with units."""
    name, what = title(run)
    console.print(Text.assemble((visible(name), "bold"), visible(f" {what}")))
    head = Table(show_header=False, box=None, padding=(0, 2))
    for row in figures(run, prices):
        head.add_row(*row)
    console.print(head)
    table = Table(title=ENERGY_TITLE, title_justify="left")
    for column in ENERGY_COLUMNS:
        table.add_column(column, justify="left" if column == ENERGY_COLUMNS[0] else "right")
    for cells in energy_rows(run):
        table.add_row(*cells)
    console.print(table)


def _per_second(data: dict[str, Any]) -> str:
    whole, gpu, user = (data[f"tokens_per_s{each}"] for each in ("", "_per_gpu", "_per_user"))
    return f"{count(whole)}  ({count(gpu)} per GPU, {count(user)} per user)"


def share(value: float | None) -> str:
    """A share of one in percent; a dash for what is not known."""
    return "-" if value is None else f"{value:.0%}"


def count(number: float) -> str:
    """A number in the digits that matter.

    >>> count(40467.65), count(67.2242)
    ('40,468', '67.22')
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _used(data: dict[str, Any]) -> str:
    """Shares of the datasheet's FLOP rate and bandwidth; no rate is known for every type on every GPU."""
    mbu = f"{data['mbu']:.1%} of HBM bandwidth"
    if data["mfu"] is None:
        return mbu
    return f"{data['mfu']:.1%} of {data['mfu_type']} FLOP/s ({data['mfu_at_clock']:.1%} at this clock), {mbu}"


def _intensity(data: dict[str, Any]) -> list[tuple[str, str]]:
    if data["flops_per_hbm_byte"] is None:
        return []
    return [("arithmetic intensity", f"{data['flops_per_hbm_byte']:.3g} FLOP per byte of HBM traffic")]


def _held(used: MemoryUse) -> str:
    room = f"{used.room_bytes / 1e9:.1f} GB left" if used.room_bytes >= 0 else "does not fit"
    return f"{used.need}; {room}, largest batch {used.largest_batch:,}"


def _exposed(run: Run) -> str:
    """The sum, and its kinds where there are several: moving data, and waiting for the last rank."""
    kinds = run.exposed_and_waiting_s
    parts = [f"{kind} {duration(exposed_s)}" for kind, (exposed_s, _) in kinds.items() if exposed_s > 0.0]
    if (waiting := sum(waiting_s for _, waiting_s in kinds.values())) > 1e-9:
        parts.append(f"waiting {duration(waiting)}")
    text = duration(run.exposed_communication_s)
    return f"{text}  ({', '.join(parts)})" if len(parts) > 1 else text


def _balance(balance: dict[str, float]) -> str:
    text = f"{balance['busiest_over_mean']:.2f} x the mean rank's"
    if "mean_of_seeds" in balance:
        text += (
            f" in this draw; other seeds {balance['least_of_seeds']:.2f} to {balance['most_of_seeds']:.2f}, "
            f"mean {balance['mean_of_seeds']:.2f}"
        )
    return text


def simulated(run: Run) -> str:
    """How much of the run was simulated."""
    outcome = run.outcome
    ranks = f"equal ranks ({len(outcome.folding.classes)} of {run.gpus} GPUs)" if run.gpus > 1 else ""
    both = " and ".join(part for part in (ranks, "equal layers once") if part)
    match outcome.detail:
        case "segment":
            return both
        case "folded" if ranks:
            return f"{ranks} once"
        case _:
            return "every rank and layer"


def by_events(run: Run) -> str:
    """How many kernels went through SimPy, and what became of the others."""
    outcome = run.outcome
    done, kernels = outcome.events_kernels, outcome.kernels
    if done == kernels:
        return f"all kernels ({outcome.events:,} events)"
    if not done:
        return "none: streams are summed, equal ranks and layers once"
    return f"{done:,} kernels ({outcome.events:,} events), {kernels - done:,} derived from them"


def status_text(run: Run) -> str:
    """What the numbers rest on, with expected errors and what lies outside the measured."""
    return run.standing.words()


def duration(seconds: float) -> str:
    """Seconds in the unit that leaves few digits.

    >>> duration(0.0123)
    '12.3 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def extent(values: tuple[float, ...], scale: float, unit: str) -> str:
    """The least and the greatest of ``values / scale``, or one number where they agree."""
    low, high = min(values) / scale, max(values) / scale
    return f"{low:.0f} {unit}" if high - low < 0.5 else f"{low:.0f} to {high:.0f} {unit}"
