"""The requests that a server's fields ask for: read or drawn, with their adapters and images."""

from __future__ import annotations

from dataclasses import replace

from inputs.texts import truncated
from sim.errors import ScenarioError
from sim.serving.images import with_image_tokens
from sim.serving.request_files import read_traffic
from sim.serving.requests import (
    TIME_LIMIT_S,
    Request,
    Traffic,
    apart,
    arrivals,
    lengths,
    made,
    scaled,
    with_adapters,
)
from sim.serving.server_fields import ServerFields

# Fields of requests that choose adapters.
LORA_TRAFFIC = ("lora_popularity", "lora_share")
# The seed of the draw of adapters is the server's and so much more, as those of lengths are.
ADAPTER_DRAWS = 5


def traffic_of(fields: ServerFields) -> Traffic:
    """The requests, in order of arrival; all at once in a closed loop, which spaces them by itself."""
    scales = {"time": fields.time_scale, "length": fields.length_scale}
    if fields.trace is not None:
        found = read_traffic(fields.trace, limit=fields.requests, block_tokens=fields.trace_block_tokens)
        return replace(
            found, requests=_seen(fields, _adapted(fields, scaled(found.requests, **scales), found.adapters))
        )
    count = fields.requests or 1000
    if fields.concurrency is not None:
        times = [0.0] * count
    else:
        times = arrivals(
            fields.arrivals, rate_per_s=fields.rate_per_s, count=count, burstiness=fields.burstiness, seed=fields.seed
        )
    inputs = lengths(fields.input_tokens, count=count, spread=fields.length_spread, seed=fields.seed + 1)
    outputs = lengths(fields.output_tokens, count=count, spread=fields.length_spread, seed=fields.seed + 2)
    drawn = made(times, inputs, outputs)
    if set(scales.values()) != {1.0}:
        drawn = scaled(drawn, **scales)
    drawn = _adapted(fields, drawn, None)
    if fields.images:
        width, height = fields.image_width, fields.image_height
        size = None if width is None or height is None else (width, height)
        drawn = [replace(one, images=fields.images, image_size=size) for one in drawn]
    return Traffic(requests=_seen(fields, drawn))


def _seen(fields: ServerFields, requests: list[Request]) -> list[Request]:
    """``requests`` with the tokens of their images; refused where the last comes so late that steps of milliseconds are
    lost in the digits of its time."""
    if (last_s := max((one.arrival_s for one in requests), default=0.0)) > TIME_LIMIT_S:
        name, value = ("time_scale", fields.time_scale) if fields.trace else ("rate_per_s", fields.rate_per_s)
        raise ScenarioError(
            f"{name} = {value:g}: the last of {len(requests):,} requests comes after {last_s:.3g} s: give at most "
            f"{TIME_LIMIT_S:.0e} s of traffic"
        )
    others = {
        "pp": fields.pp > 1,
        "cp": max(fields.cp, fields.prefill_cp or 1) > 1,
        "sm_partition": fields.sm_partition,
    }
    beside = next((name for name, there in others.items() if there), "")
    if beside and any(one.images for one in requests):
        raise ScenarioError(f"images: not known beside {beside}: leave one of them out")
    return with_image_tokens(requests, fields.model)


def _adapted(fields: ServerFields, requests: list[Request], named: tuple[str, ...] | None) -> list[Request]:
    """``requests`` with the adapters that they ask for: those ``named`` in their file (maybe none), else drawn ones."""
    count = fields.lora_adapters
    if named and len(named) > count:
        raise ScenarioError(
            f"lora_adapters = {count}: the requests of {fields.trace} ask for {len(named)} "
            f"({truncated(', '.join(named), 40)}): give lora_adapters = {len(named)}"
        )
    if not count:
        return requests
    if named is None:
        seed = fields.seed + ADAPTER_DRAWS
        return with_adapters(requests, count=count, law=fields.lora_popularity, share=fields.lora_share, seed=seed)
    for name in LORA_TRAFFIC:
        if (value := getattr(fields, name)) != ServerFields.model_fields[name].default:
            raise ScenarioError(f"{name} = {value} contradicts the column adapter of {fields.trace}: give one of them")
    return apart(requests)
