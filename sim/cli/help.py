"""How a command shows its options, in panels with examples, and how it answers a word that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from sim.cli.examples import EXAMPLES

# Options by what they are about, under their parameter's name; others stand first, under the command's own heading.
PANELS = {
    "Model and work": (
        "model", "phase", "batch", "seq_len", "source_len", "output_len", "images", "layers", "lm_head", "dtype",
        "weight_dtype", "kv_dtype", "stack", "launch",
    ),
    "Machine": ("gpu", "profile", "node"),
    "Layout over GPUs": (
        "tp", "ep", "ep_mode", "sequence_parallel", "cp", "cp_mode", "ulysses", "pp", "micro_batches", "pp_schedule",
        "dp", "replicas", "prefill_replicas", "all_reduce",
    ),
    "Communication beside compute": (
        "overlap", "overlap_chunks", "overlap_ops", "comm_ctas", "comm_sms", "sm_margin", "sm_partitions",
        "sm_partition",
    ),
    "Experts": ("expert_skew", "routing", "routing_seed", "expert_replicas", "tokens_per_ep_rank"),
    "Training (phase train)": ("optimizer", "sharding", "accumulate"),
    "Video (phase denoise)": ("video", "steps", "guidance", "reuse"),
    "Traffic": (
        "trace", "trace_block_tokens", "arrivals", "rate_per_s", "burstiness", "concurrency", "requests",
        "input_tokens", "output_tokens", "length_spread", "time_scale", "length_scale", "seed",
    ),
    "Engine": (
        "max_num_seqs", "max_num_batched_tokens", "block_tokens", "memory_share", "kv_blocks", "prefix_caching",
        "preemption", "sampling", "attention", "host", "captured_tokens", "host_ms",
    ),
    "Routing, scaling, failures": (
        "router", "autoscale", "autoscale_target", "autoscale_look_s", "autoscale_calm_s", "min_replicas",
        "start_up_s", "kill", "router_down",
    ),
    "Targets and prices": (
        "slo_ttft_s", "slo_tpot_s", "objective", "price_per_gpu_hour", "price_per_kwh", "carbon_g_per_kwh", "within",
    ),
    "Power, clocks, chips": (
        "power_cap_w", "prefill_power_cap_w", "uncapped", "sm_clock_mhz", "clock_policy", "clock_hold_s",
        "chip_temperature_c", "chip_power_factor", "regime",
    ),
    "How it is simulated": ("detail", "ignore_memory", "uncertainty", "jobs", "backend", "address", "fresh"),
    "Output": (
        "as_json", "quiet", "out", "csv", "plot", "html", "report", "kernels", "trace_layout", "trace_names",
        "window", "counter_ms", "chakra", "traces", "timeline", "power", "python", "latex", "rows", "records", "top",
        "help",
    ),
}  # fmt: skip
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
# Panels that a command reads otherwise: one parameter's name can mean two things.
OWN_PANELS = {
    ("simulate", "trace"): "Output",
    ("replay", "trace"): "Output",
    ("plan", "launch"): "Output",
    ("plan", "gpus"): "Layout over GPUs",
    ("plan", "input_len"): "Model and work",
}
# Names that other tools give to an option, and what it is called here (the first that the command has).
OTHER_NAMES = {
    "tensor_parallel_size": ("tp",), "tensor_parallel": ("tp",), "tp_size": ("tp",), "num_gpus": ("gpus", "tp"),
    "gpus": ("tp",), "n_gpus": ("gpus", "tp"), "world_size": ("tp",), "pipeline_parallel_size": ("pp",),
    "data_parallel_size": ("dp", "replicas"), "expert_parallel_size": ("ep",), "batch_size": ("batch",),
    "bs": ("batch",), "context": ("seq_len",), "context_len": ("seq_len",), "seqlen": ("seq_len",),
    "prompt_len": ("input_len", "input_tokens", "seq_len"), "input_len": ("input_tokens", "seq_len"),
    "max_tokens": ("output_len", "output_tokens"), "chunks": ("overlap_chunks",), "ctas": ("comm_ctas",),
    "sms": ("comm_ctas",), "blocks": ("comm_ctas",), "power_cap": ("power_cap_w",), "power_limit": ("power_cap_w",),
    "cap": ("power_cap_w",), "clock": ("sm_clock_mhz",), "sm_clock": ("sm_clock_mhz",), "qps": ("rate_per_s",),
    "rps": ("rate_per_s",), "rate": ("rate_per_s",), "request_rate": ("rate_per_s",), "num_prompts": ("requests",),
    "quantization": ("weight_dtype", "dtype"), "precision": ("dtype",), "slo_ttft": ("slo_ttft_s",),
    "slo_tpot": ("slo_tpot_s",), "ttft": ("slo_ttft_s",), "tpot": ("slo_tpot_s",), "output": ("out", "trace"),
    "engine": ("stack",), "backend": ("stack",), "num_layers": ("layers",),
}  # fmt: skip


class Helped(click.Command):
    """A command whose options stand in panels, with examples below, and whose refusals name what would be right."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options by what they are about."""
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in ("Options", *PANELS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None and parameter.name is not None:
                name = "help" if "--help" in parameter.opts else parameter.name
                panel = OWN_PANELS.get((self.name or "", name), PANEL_OF.get(name, "Options"))
                panels[panel].append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands to start from, never broken into lines of their own."""
        examples = EXAMPLES.get(_path(ctx), ())
        if examples:
            with formatter.section("Examples"):
                for line in examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; a refusal names the remedy."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if (text := _remedied(self, ctx, error)) is None:
                raise
            raise click.UsageError(text, ctx) from error


class HelpGroup(Helped, click.Group):
    """A group of such commands."""

    command_class = Helped


def _remedied(command: click.Command, ctx: click.Context, error: click.UsageError) -> str | None:
    """The message of ``error`` with what would be right, where click's own does not say it."""
    flags = {p.name: p.opts[-1] for p in command.params if isinstance(p, click.Option)}
    match error:
        case click.NoSuchOption():
            wanted = OTHER_NAMES.get(error.option_name.lstrip("-").replace("-", "_"), ())
            for name in (one for one in wanted if one in flags):
                return f"unknown option '{error.option_name}': it is {flags[name]} here"
            return None
        case click.MissingParameter():
            return f"{error.format_message().rstrip('.')}: {_see(ctx)}"
        case click.BadOptionUsage() if "requires an argument" in error.message:
            return f"{error.message.rstrip('.')}: {_see(ctx)}"
        case click.BadParameter() if error.message.endswith("is not a valid integer."):
            return f"{error.format_message().rstrip('.')}: give digits alone, such as 4096"
        case click.BadParameter() if error.message.endswith("is not a valid float."):
            return f"{error.format_message().rstrip('.')}: give a number alone, without a unit"
        case click.BadParameter() | click.BadArgumentUsage():
            return None
        case _ if "unexpected extra argument" in error.message:
            word = error.message.partition("(")[2].rstrip(").")
            return f"unexpected '{word}': {_see(ctx)}"
        case _:
            return None


def _see(ctx: click.Context) -> str:
    examples = EXAMPLES.get(_path(ctx), ())
    return f"for example, {examples[0]}" if examples else f"see '{ctx.command_path} --help'"


def _path(ctx: click.Context) -> str:
    """The command's name below ``wattline``: ``kernel gemm``."""
    names: list[str] = []
    at: click.Context | None = ctx
    while at is not None and at.parent is not None:
        names.insert(0, at.command.name or "")
        at = at.parent
    return " ".join(names)


# -- completion ------------------------------------------------------------------------------------------------


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:  # noqa: ARG001 - click's signature
    """Ids of the catalog; where none begins so, the shell looks among files."""
    from click.shell_completion import CompletionItem

    from workloads.catalog import list_models

    found = list(_beginning(list_models(), incomplete))
    return [CompletionItem(one) for one in found] or [CompletionItem(incomplete, type="file")]


def complete_gpu(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    """Ids of the catalog."""
    from hardware.catalog import list_gpus

    return list(_beginning(list_gpus(), incomplete))


def complete_stack(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 - click's signature
    """Names of the stacks."""
    from workloads.stack import STACKS

    return list(_beginning(STACKS, incomplete))


def _beginning(known: Any, incomplete: str) -> Iterator[str]:
    return (name for name in known if name.startswith(incomplete.lower()))


COMPLETE = {"model": complete_model, "gpu": complete_gpu, "stack": complete_stack}
