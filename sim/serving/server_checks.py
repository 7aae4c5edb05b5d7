"""What fields of a server contradict one another."""

from __future__ import annotations

from sim.scenario.adapters import LORA_FIELDS, check_unused
from sim.scenario.speculation import check_speculation
from sim.serving.server_fields import ServerFields
from sim.serving.traffic import LORA_TRAFFIC

TIER_FIELDS = ("kv_host_gb", "kv_disk_gb", "kv_remote_gb")
# Of a server that has adapters, and of requests that choose them.
LORA_SERVER = (*LORA_FIELDS[1:], "max_loras", *LORA_TRAFFIC)


def check_server(fields: ServerFields) -> None:
    """Raise where fields of a server contradict one another, or one is of what is not there."""
    defaults = fields.defaults()
    check_speculation(fields, defaults)
    if not fields.lora_adapters:
        check_unused(fields, defaults, LORA_SERVER)
    each = 1 if fields.speculation is None else fields.draft_tokens + 1
    if fields.max_num_seqs * each >= fields.max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens = {fields.max_num_batched_tokens}: must exceed max_num_seqs = "
            f"{fields.max_num_seqs}, {'a token' if each == 1 else f'{each} tokens'} for each and room for prompts"
        )
    _check_images(fields)
    if fields.clock_policy == "slo" and fields.speculation is not None:
        raise ValueError(f"clock_policy = slo is not known beside speculation = '{fields.speculation}': leave one out")
    if fields.clock_policy == "slo" and fields.slo_tpot_s is None:
        raise ValueError("clock_policy = slo: needs the objective to keep, slo_tpot_s")
    if fields.pp_batches != "natural" and fields.pp == 1:
        raise ValueError(f"pp_batches = {fields.pp_batches}: is of batches in a pipeline: give pp of at least 2")
    if fields.cp_mode != "all_gather" and max(fields.cp, fields.prefill_cp or 1) == 1:
        raise ValueError(f"cp_mode = {fields.cp_mode}: is of ranks that share tokens: give cp of at least 2")
    if fields.pp > 1 and fields.speculation not in (None, "eagle"):
        raise ValueError(
            f"speculation = '{fields.speculation}' is not known beside pp = {fields.pp}: vLLM drafts there with eagle"
        )
    if fields.clock_policy == "slo" and fields.pp > 1:
        raise ValueError(f"pp = {fields.pp} is not known beside clock_policy = slo: leave one of them out")
    if fields.clock_policy == "slo" and fields.sm_clock_mhz is not None:
        raise ValueError(f"sm_clock_mhz = {fields.sm_clock_mhz:g} contradicts clock_policy = slo: give one of them")
    if fields.prefill_sm_clock_mhz is not None and fields.clock_policy == "slo":
        raise ValueError(
            f"prefill_sm_clock_mhz = {fields.prefill_sm_clock_mhz:g} contradicts clock_policy = slo: give one of them"
        )
    if fields.prefill_sm_clock_mhz is not None and not fields.prefill_replicas:
        for name, there in (
            ("pp", fields.pp > 1),
            ("fleet_power_w", fields.fleet_power_w),
            ("sm_partition", fields.sm_partition),
        ):
            if there:
                raise ValueError(
                    f"prefill_sm_clock_mhz = {fields.prefill_sm_clock_mhz:g} is not known beside {name} without "
                    "prefill_replicas: leave one of them out"
                )
    if fields.kv_remote_gb_per_s is not None and fields.kv_remote_gb is None:
        raise ValueError(f"kv_remote_gb_per_s = {fields.kv_remote_gb_per_s:g}: is of a store: give kv_remote_gb")
    if not fields.prefix_caching and (named := [name for name in TIER_FIELDS if getattr(fields, name)]):
        raise ValueError(f"{named[0]} = {getattr(fields, named[0]):g} contradicts prefix_caching = false")
    for name in ("prefill_tp", "prefill_ep", "prefill_cp"):
        if getattr(fields, name) is not None and not fields.prefill_replicas:
            raise ValueError(f"{name} = {getattr(fields, name)}: is of replicas for prompts: give prefill_replicas")
    _check_fleet(fields)
    if fields.autoscale is not None and fields.prefill_replicas:
        raise ValueError(f"prefill_replicas = {fields.prefill_replicas}: autoscale knows replicas of one kind only")
    if fields.sm_partition is not None:
        _check_sides(fields, dict(fields.sm_partition))
    if fields.min_replicas > fields.replicas:
        raise ValueError(f"min_replicas = {fields.min_replicas} is more than replicas = {fields.replicas}")
    if fields.concurrency is not None and "rate_per_s" in fields.model_fields_set:
        raise ValueError(f"concurrency = {fields.concurrency} contradicts rate_per_s: give one of them")
    if fields.trace is not None and fields.concurrency is not None:
        raise ValueError(f"concurrency = {fields.concurrency} contradicts trace: a trace says when requests arrive")


def _check_images(fields: ServerFields) -> None:
    if fields.images and fields.trace is not None:
        raise ValueError(f"images = {fields.images} contradicts trace: give the file a column images")
    sides = (fields.image_width, fields.image_height)
    if any(sides) and not fields.images:
        name = "image_width" if fields.image_width else "image_height"
        raise ValueError(f"{name} = {getattr(fields, name)}: is of images: say how many a request has")
    if any(sides) and not all(sides):
        raise ValueError("image_width and image_height go together: give both, in pixels")


def _check_fleet(fields: ServerFields) -> None:
    if fields.fleet_power_w is None:
        for name in ("fleet_policy", "fleet_look_s"):
            if (value := getattr(fields, name)) != fields.defaults()[name]:
                raise ValueError(f"{name} = {value}: is of a budget: give fleet_power_w")
        return
    for name in ("power_cap_w", "prefill_power_cap_w", "autoscale", "sm_partition"):
        if (value := getattr(fields, name)) is not None:
            raise ValueError(f"{name} = {value} is not known beside fleet_power_w: leave one of them out")
    if fields.clock_policy == "slo":
        raise ValueError("clock_policy = slo is not known beside fleet_power_w: leave one of them out")


def _check_sides(fields: ServerFields, sms: dict[str, int]) -> None:
    text = ",".join(f"{name}={count}" for name, count in fields.sm_partition or ())
    if sorted(sms) != ["decode", "prefill"] or len(fields.sm_partition or ()) != 2:
        raise ValueError(f"sm_partition = {text}: give prefill and decode their SMs, like prefill=64,decode=68")
    others = {
        "prefill_replicas": fields.prefill_replicas,
        "autoscale": fields.autoscale,
        "prefill_power_cap_w": fields.prefill_power_cap_w,
        "clock_policy": fields.clock_policy if fields.clock_policy != "fixed" else None,
        "launch": fields.launch if fields.launch != "graph" else None,
        "speculation": fields.speculation,
        "lora_adapters": fields.lora_adapters,
        **{name: getattr(fields, name) for name in TIER_FIELDS},
        "pp": fields.pp if fields.pp > 1 else None,
    }
    for name, value in others.items():
        if value:
            raise ValueError(f"{name} = {value} is not known beside sm_partition: leave one of them out")
