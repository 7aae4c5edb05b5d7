"""How a command shows its options, in panels with examples, and how it answers a word that it does not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import click

from inputs.suggest import nearest
from sim.cli.examples import EXAMPLES
from sim.scenario.fields import Phase

# Options by what they are about, under their parameter's name; others stand first, under the command's own heading.
PANELS = {
    "Model and work": (
        "model", "phase", "batch", "seq_len", "source_len", "output_len", "images", "layers", "lm_head", "dtype",
        "weight_dtype", "kv_dtype", "stack", "launch",
    ),
    "Machine": ("gpu", "profile", "node", "network", "placement", "ecmp_seed"),
    "Layout over GPUs": (
        "tp", "ep", "ep_mode", "ep_kernels", "dispatch_dtype", "sequence_parallel", "cp", "cp_mode", "dcp", "ulysses",
        "pp", "pp_batches", "micro_batches", "pp_schedule", "dp", "replicas", "prefill_replicas", "prefill_tp",
        "prefill_ep", "prefill_cp", "all_reduce",
    ),
    "Communication beside compute": (
        "overlap", "overlap_chunks", "overlap_ops", "comm_ctas", "comm_sms", "sm_margin", "sm_partitions",
        "sm_partition",
    ),
    "Experts": ("expert_skew", "routing", "routing_seed", "expert_replicas", "tokens_per_ep_rank"),
    "Speculation": ("speculation", "draft_model", "draft_tokens", "acceptance"),
    "Adapters (LoRA)": (
        "lora_adapters", "max_loras", "max_lora_rank", "lora_targets", "lora_popularity", "lora_share",
    ),
    "Training (phase train)": ("optimizer", "sharding", "accumulate"),
    "Video (phase denoise)": ("video", "steps", "guidance", "reuse"),
    "Traffic": (
        "trace", "trace_block_tokens", "arrivals", "rate_per_s", "burstiness", "concurrency", "requests",
        "input_tokens", "output_tokens", "image_width", "image_height", "length_spread", "time_scale", "length_scale",
        "seed",
    ),
    "Engine": (
        "max_num_seqs", "max_num_batched_tokens", "block_tokens", "memory_share", "kv_blocks", "prefix_caching",
        "preemption", "kv_host_gb", "kv_disk_gb", "kv_remote_gb", "kv_remote_gb_per_s", "sampling", "attention", "host",
        "captured_tokens", "host_ms", "host_pace",
    ),
    "Routing, scaling, failures": (
        "router", "autoscale", "autoscale_target", "autoscale_look_s", "autoscale_calm_s", "min_replicas",
        "start_up_s", "kill", "router_down",
    ),
    "Targets and prices": (
        "slo_ttft_s", "slo_tpot_s", "objective", "price_per_gpu_hour", "price_per_kwh", "carbon_g_per_kwh", "within",
    ),
    "Power, clocks, chips": (
        "power_cap_w", "prefill_power_cap_w", "fleet_power_w", "fleet_policy", "fleet_look_s", "uncapped",
        "sm_clock_mhz", "prefill_sm_clock_mhz", "clock_policy", "clock_hold_s",
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
    "gpus": ("tp", "cp"), "n_gpus": ("gpus", "tp"), "world_size": ("tp",), "pipeline_parallel_size": ("pp",),
    "context_parallel_size": ("cp",), "prefill_context_parallel_size": ("cp",), "pcp_size": ("cp",),
    "decode_context_parallel_size": ("dcp",), "dcp_size": ("dcp",),
    "data_parallel_size": ("dp", "replicas"), "dp": ("replicas",), "disaggregated": ("prefill_replicas",),
    "expert_parallel_size": ("ep",), "batch_size": ("batch",),
    "bs": ("batch",), "context": ("seq_len",), "context_len": ("seq_len",), "seqlen": ("seq_len",),
    "prompt_len": ("input_len", "input_tokens", "seq_len"), "input_len": ("input_tokens", "seq_len"),
    "max_tokens": ("output_len", "output_tokens"), "chunks": ("overlap_chunks",), "ctas": ("comm_ctas",),
    "sms": ("comm_ctas",), "blocks": ("comm_ctas",), "power_cap": ("power_cap_w",), "power_limit": ("power_cap_w",),
    "cap": ("power_cap_w",), "clock": ("sm_clock_mhz",), "sm_clock": ("sm_clock_mhz",), "qps": ("rate_per_s",),
    "rps": ("rate_per_s",), "rate": ("rate_per_s",), "request_rate": ("rate_per_s",), "num_prompts": ("requests",),
    "quantization": ("weight_dtype", "dtype"), "precision": ("dtype",),
    "ttft_ms": ("slo_ttft_s",), "tpot_ms": ("slo_tpot_s",), "slo_ttft_ms": ("slo_ttft_s",),
    "slo_tpot_ms": ("slo_tpot_s",), "itl": ("slo_tpot_s",), "slo_ttft": ("slo_ttft_s",),
    "slo_tpot": ("slo_tpot_s",), "ttft": ("slo_ttft_s",), "tpot": ("slo_tpot_s",), "output": ("out", "trace"),
    "engine": ("stack",), "backend": ("stack",), "num_layers": ("layers",),
}  # fmt: skip


# Options that a command lacks for a reason.
LACKING = {
    ("serve", "ulysses"): "give --cp 2 --cp-mode ulysses",
    ("plan", "pp"): "a plan tries every way to cut the GPUs: give --gpus alone",
    ("ui", "host"): "the page answers 127.0.0.1 only: from another machine, ssh -L 8061:127.0.0.1:8061",
    ("plan", "tp"): "a plan tries every way to cut the GPUs: give --gpus alone",
    ("plan", "ep"): "a plan tries every way to cut the GPUs: give --gpus alone",
    ("plan", "batch"): "a plan finds the highest load: give its targets, --slo-ttft-s and --slo-tpot-s",
    ("models", "search"): "give a model to see it: wattline models llama3-8b",
    ("gpus", "gpu"): "give a GPU to see it: wattline gpus h100",
    ("memory", "gpu_memory"): "it is the GPU's: give --gpu, an id ('wattline gpus' lists them) or a .toml file",
    ("ui", "model"): "give the model alone: wattline ui llama3-8b",
    ("simulate", "out"): "files are --trace, --report and --kernels; --json goes to standard output",
}


# Columns below which a description stands under its option.
NARROW = 60
# How click's words end where digits were wanted.
_NO_NUMBER = ("a valid integer.", "a valid integer range.")


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
                    formatter.write_dl(records, col_max=30 if formatter.width > NARROW else 4)
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
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if (text := _remedied(self, ctx, error, given)) is None:
                raise
            raise click.UsageError(text, ctx) from error


class HelpGroup(Helped, click.Group):
    """A group of such commands."""

    command_class = Helped

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that comes first; of an unknown one, the nearest."""
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            raise click.UsageError(f"unknown command '{args[0]}': {nearest(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)


def _remedied(command: click.Command, ctx: click.Context, error: click.UsageError, args: Sequence[str]) -> str | None:
    """The message of ``error`` over ``args`` with what would be right, where click's own does not say it."""
    flags = {p.name: p.opts[-1] for p in command.params if isinstance(p, click.Option)}
    match error:
        case click.NoSuchOption():
            name = error.option_name.lstrip("-").replace("-", "_")
            if why := LACKING.get((command.name or "", name)):
                return f"unknown option '{error.option_name}': {why}"
            for one in args:  # -tp: to click, a -t
                if one[:2] == error.option_name and f"-{one.partition('=')[0]}" in flags.values():
                    return f"unknown option '{one}': write it with two dashes, -{one}"
            if name in flags:  # --seq_len
                return f"unknown option '{error.option_name}': it is {flags[name]} here"
            if "phase" in flags and name in get_args(Phase):
                return f"unknown option '{error.option_name}': it is --phase {name} here"
            wanted = OTHER_NAMES.get(name, ())
            for name in (other for other in wanted if other in flags):
                unit = ", in seconds" if error.option_name.endswith("ms") and flags[name].endswith("-s") else ""
                return f"unknown option '{error.option_name}': it is {flags[name]} here{unit}"
            return None if error.possibilities else f"unknown option '{error.option_name}': {_see(ctx, listed=True)}"
        case click.MissingParameter():
            return f"{error.format_message().rstrip('.')}: {_see(ctx)}"
        case click.BadOptionUsage() if "requires an argument" in error.message:
            return f"{error.message.rstrip('.')}: {_see(ctx)}"
        case click.BadParameter() if error.message.endswith(_NO_NUMBER) and "," in error.message:
            return f"{error.format_message().rstrip('.')}: one number; for several, wattline sweep"
        case click.BadParameter() if error.message.endswith(_NO_NUMBER):
            return f"{error.format_message().rstrip('.')}: give digits alone, such as 4096"
        case click.BadParameter() if error.message.endswith("is not a valid float."):
            return f"{error.format_message().rstrip('.')}: give a number alone, without a unit"
        case click.BadParameter() | click.BadArgumentUsage():
            return None
        case _ if "unexpected extra argument" in error.message:
            word = error.message.partition("(")[2].rstrip(").")
            if "--json" in args and word.endswith(".json"):
                return f"unexpected '{word}': --json prints on standard output: write it with > {word}"
            return f"unexpected '{word}': {_see(ctx)}"
        case _:
            return None


def _see(ctx: click.Context, *, listed: bool = False) -> str:
    examples = () if listed else EXAMPLES.get(_path(ctx), ())
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
