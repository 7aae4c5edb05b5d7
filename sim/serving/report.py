"""What a served run says about itself to people, and its tables as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.output.console import visible
from sim.result.prices import NO_PRICES, Prices
from sim.scenario.precision import precision_of
from sim.serving.result import ServeResult

# Parts of the energy whose name alone does not say what they are.
PART_WORDS = {"transfer": "KV transfers"}
# Latencies of the summary, as people read them.
LATENCIES = (
    ("time to first token", "ttft_s"),
    ("time per output token", "tpot_s"),
    ("between tokens", "itl_s"),
    ("end to end", "e2e_s"),
    ("in the queue", "queue_s"),
)


def print_summary(run: ServeResult, console: Console, prices: Prices = NO_PRICES) -> None:
    """Headline figures, latency percentiles and where the joules go, with units."""
    spec, data = run.spec, run.summary | run.utilisation
    roles = spec.roles
    if spec.sm_partition is not None:
        sms = dict(spec.sm_partition)
        roles += f", prefill on {sms['prefill']} SMs beside decode on {sms['decode']}"
    types = precision_of(spec.group()).words()
    setup = f" in {types}, served on {data['gpus']} x {data['gpu']} ({roles}), {spec.router}"
    console.print(Text.assemble((visible(spec.model), "bold"), visible(setup)))
    head = Table(show_header=False, box=None, padding=(0, 2))
    head.add_row("requests", f"{data['requests']:,} in {data['duration_s']:.4g} s")
    if data["requests_left_out"]:
        head.add_row("left out", f"{data['requests_left_out']:,} requests of the file that got no output token")
    head.add_row(
        "throughput",
        f"{data['requests_per_s']:.4g} requests, {data['output_tokens_per_s']:,.0f} output tokens a second"
        f"{_each(data)}",
    )
    if data["slo_share"] is not None:
        head.add_row("within the SLO", f"{data['slo_share']:.1%}  ({data['goodput_per_s']:.4g} requests a second)")
    head.add_row(
        "energy, all GPUs",
        f"{data['energy_j']:,.4g} J  ({data['energy_j_per_request']:.4g} J or "
        f"{data['energy_wh_per_request']:.3g} Wh a request, "
        f"{data['energy_j_per_output_token']:.4g} J an output token)",
    )
    for row in prices.rows(run.costs(prices)):
        head.add_row(*row)
    used = " and ".join(
        f"{'-' if data[name] is None else format(data[name], '.1%')} of the {what}"
        for name, what in (("mfu", "FLOP/s"), ("mbu", "HBM bandwidth"))
    )
    head.add_row("MFU, MBU", f"{used} of the GPUs that are on")
    head.add_row("mean power per GPU", f"{data['power_w_per_gpu']:.0f} W")
    if data["fleet_power_w_most"] is not None:
        most = f"{data['fleet_power_w_most']:,.0f} W over {spec.fleet_look_s:g} s at most"
        head.add_row("fleet", f"{most}, of {spec.fleet_power_w:,.0f} W ({spec.fleet_policy})")
    head.add_row("KV cache of a replica", f"{data['kv_blocks'] * data['kv_block_tokens']:,} tokens")
    head.add_row("memory", _held(data["memory_bytes_per_gpu"]))
    if data["tokens_per_step"] is not None:
        drafted = f"(of {spec.draft_tokens} drafted by {spec.draft_model or spec.speculation}, and one)"
        head.add_row("tokens a step", f"{data['tokens_per_step']:.3g} a sequence  {drafted}")
    if adapters := data.get("adapters"):
        head.add_row(
            "adapters",
            f"{adapters['asked_for']} of {spec.lora_adapters} asked for, {(slots := adapters['slots_per_replica'])} "
            f"slot{'s' * (slots > 1)} "
            f"({adapters['bytes_per_gpu'] / 1e9:.3g} GB a GPU); {adapters['loads']:,} loads, for which steps waited "
            f"{adapters['load_s']:.3g} s",
        )
    if images := data.get("images"):
        head.add_row("images", f"{images['count']:,}, {images['tokens'] / images['count']:,.0f} tokens each on average")
    if spec.autoscale is not None:
        head.add_row("GPU hours", f"{data['gpu_hours']:.4g}  ({data['replica_starts']} starts of replicas)")
    if pipeline := data.get("pipeline"):
        busy = ", ".join(f"{stage['busy_share']:.0%}" for stage in pipeline["stages"])
        share = pipeline["bubble_energy_j"] / data["energy_j"]
        head.add_row("stages at work", f"{busy} of the time; {share:.1%} of the joules in bubbles and pauses")
        held = ", ".join(
            f"{stage['layers']} layers, {stage['weight_bytes_per_gpu'] / 1e9:.4g} GB" for stage in pipeline["stages"]
        )
        head.add_row("weights of a GPU, by stage", held)
    head.add_row("waiting at most", f"{data['most_waiting']:,} requests")
    if data["preemptions"]:
        head.add_row("preemptions", f"{data['preemptions']:,}")
    if data["hit_tokens"]:
        by_tier = {name: tokens for name, tokens in data["hit_tokens_by_tier"].items() if tokens}
        where = "" if set(by_tier) == {"hbm"} else ": " + ", ".join(f"{n:,} {tier}" for tier, n in by_tier.items())
        head.add_row("prompt tokens found in cache", f"{data['hit_tokens']:,}  ({data['hit_share']:.1%}{where})")
    said = f"{data['stack']} ({spec.stack_reason})" if spec.stack_reason else data["stack"]
    head.add_row("stack", visible(said))
    head.add_row(
        "these numbers are", "; ".join(filter(None, (data["status"], data["expected_error"], *data["status_reasons"])))
    )
    console.print(head)
    table = Table(title="Latency (ms)", title_justify="left")
    names = ("mean", "p50", "p90", "p99")
    for column in ("", *names):
        table.add_column(column, justify="right" if column else "left")
    for label, key in LATENCIES:
        if data[key] is not None:
            table.add_row(label, *(f"{data[key][name] * 1e3:,.4g}" for name in names))
    console.print(table)
    parts = Table(title="Where the joules go", title_justify="left")
    for column in ("part", "energy J", "share", "J a request"):
        parts.add_column(column, justify="left" if column == "part" else "right")
    for name, energy_j in data["energy_j_by_part"].items():
        share = energy_j / data["energy_j"]
        parts.add_row(
            PART_WORDS.get(name, name), f"{energy_j:,.4g}", f"{share:.1%}", f"{energy_j / data['requests']:.4g}"
        )
    console.print(parts)


def _each(data: Mapping[str, Any]) -> str:
    """Tokens a second of a GPU, and as a user sees them."""
    seen = data["output_tokens_per_s_per_user"]
    user = "" if seen is None else f", {seen:.4g} per user"
    return f"  ({data['output_tokens_per_s_per_gpu']:,.0f} per GPU{user})"


def _held(held: Mapping[str, float]) -> str:
    parts = " + ".join(
        f"{name} {held[key] / 1e9:.1f}"
        for name, key in (("weights", "weights"), ("activations", "activations"), ("KV cache", "kv_cache"))
    )
    return f"{parts} of {held['gpu'] / 1e9:.0f} GB a GPU; at most {held['kv_cache_most'] / 1e9:.3g} GB of cache used"


def print_servers(rows: Sequence[Mapping[str, Any]], console: Console, *, title: str) -> None:
    """Servers side by side: what sets them apart first, then their figures."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    figures = [name for name in names if name in SHOWN]
    apart = [name for name in names if name not in SHOWN and name]
    table = Table(title=title, title_justify="left")
    for name in (*apart, *(SHOWN[name][0] for name in figures), *([""] if "" in names else [])):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [str(row.get(name, "-")) for name in apart]
        for name in figures:
            value = row[name]
            cells.append("-" if value is None else SHOWN[name][1].format(value * SHOWN[name][2]))
        table.add_row(*cells, *([str(row[""])] if "" in names else []))
    console.print(table)


# Figures of a row: title, format, scale.
SHOWN = {
    "gpus": ("GPUs", "{:.0f}", 1),
    "slo_share": ("in time %", "{:.1f}", 100),
    "ttft_p99_s": ("TTFT p99 ms", "{:,.4g}", 1e3),
    "tpot_p99_s": ("TPOT p99 ms", "{:,.4g}", 1e3),
    "energy_j_per_output_token": ("J an output token", "{:.4g}", 1),
    "energy_j_per_request": ("J a request", "{:,.4g}", 1),
    "power_w_per_gpu": ("W a GPU", "{:.0f}", 1),
    "gpu_hours": ("GPU hours", "{:.4g}", 1),
}
