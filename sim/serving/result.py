"""What serving comes to: percentiles, throughput, goodput, and where the joules went."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import workloads
from sim.result.prices import S_PER_HOUR, Prices
from sim.result.rates import J_PER_WH, multiplied_type
from sim.result.served import Load, standing_served
from sim.result.status import Standing
from sim.scenario.layout import layout_of
from sim.scenario.machine import Machine
from sim.scenario.precision import precision_of
from sim.scenario.resolved import resolve_scenario
from sim.serving.adapters import own_sizes
from sim.serving.memory import kv_blocks, memory_of, stage_needs
from sim.serving.records import Log
from sim.serving.spec import ServeSpec
from sim.serving.stages import stage_prices
from sim.serving.utilisation import served_work

PERCENTILES = (50, 90, 99)
# Columns of requests that are fields of their records.
TIMES = ("replica", "received_s", "started_s", "first_token_s", "done_s")
COUNTS = ("hit_tokens", "fetched_tokens", "fetch_s", "preemptions", "moves", "prefill_j", "decode_j", "transfer_j")


@dataclass(frozen=True, kw_only=True)
class ServeResult:
    """A served run. All figures follow from its log."""

    spec: ServeSpec
    machine: Machine
    log: Log
    end_s: float

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request (s, J)."""
        served = self.log.served
        asked = [one.request for one in served]
        table = pd.DataFrame(
            {
                "request": [one.number for one in asked],
                "arrival_s": [one.arrival_s for one in asked],
                "input_tokens": [one.input_tokens for one in asked],
                "output_tokens": [one.output_tokens for one in asked],
                **{name: [getattr(one, name) for one in served] for name in TIMES},
            }
        )
        table["queue_s"] = table["started_s"] - table["received_s"]
        table["ttft_s"] = table["first_token_s"] - table["arrival_s"]
        after = table["output_tokens"] - 1
        table["tpot_s"] = ((table["done_s"] - table["first_token_s"]) / after).where(after > 0)
        table["e2e_s"] = table["done_s"] - table["arrival_s"]
        if self.spec.lora_adapters:
            table["adapter"] = [one.adapter for one in asked]
        if any(one.images for one in asked):
            table["images"] = [one.images for one in asked]
            table["image_tokens"] = [one.images * one.image_tokens for one in asked]
        for name in COUNTS:
            table[name] = [getattr(one, name) for one in served]
        return table

    @cached_property
    def stretches(self) -> pd.DataFrame:
        """Stretches of equal steps, one row each: power, target, batch, queue and memory over time.

        Their joules and those of ``log.transfers`` are :attr:`energy_j`.
        """
        table = pd.DataFrame(self.log.stretches)
        if self.spec.pp == 1:
            del table["stage"]
        table["clock_mhz"] = table.pop("clock_hz") / 1e6
        gpus = table["replica"].map(self.spec.gpus_of) / self.spec.pp
        table["power_w_per_gpu"] = table["energy_j"] / (table["end_s"] - table["start_s"]) / gpus
        return table

    @property
    def energy_j(self) -> float:
        """Joules over all GPUs: the sum of :attr:`energy_j_by_part`."""
        return sum(self.energy_j_by_part.values())

    @property
    def energy_j_by_part(self) -> dict[str, float]:
        """Joules over all GPUs: prompts, decoding, KV caches that move between replicas, and pauses."""
        log = self.log
        return {"prefill": log.prefill_j, "decode": log.decode_j, "transfer": log.transfer_j, "idle": log.idle_j}

    @cached_property
    def standing(self) -> Standing:
        """What the run rests on: servers that were measured."""
        table, hits = self.requests, ("prompt tokens found in its cache",)
        return standing_served(
            self.machine,
            self.spec.group(),
            asks=self.spec.unmeasured + (hits if table["hit_tokens"].any() else ()),
            load=Load.of(table["arrival_s"].tolist(), (table["input_tokens"] + table["output_tokens"]).tolist()),
            beyond_positions=self._beyond(table),
            images="images" in table,
        )

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Headline figures in SI units."""
        spec, log, table = self.spec, self.log, self.requests
        span_s = self.end_s - float(table["arrival_s"].min())
        output = int(table["output_tokens"].sum())
        good = self._good(table)
        tpot = percentiles(table["tpot_s"].dropna())
        blocks, most_blocks = (
            spec.kv_blocks or kv_blocks(spec, spec.group(), self.machine),
            max(stretch.blocks for stretch in log.stretches),
        )
        group = spec.group()
        precision = precision_of(group)
        return {
            "model": spec.model,
            "gpu": self.machine.gpu.id,
            "stack": spec.own_stack,
            **self.standing.as_json(),
            "precision": precision.as_json(),
            "beyond_model_positions": self._beyond(table),
            "gpus": spec.gpus,
            "requests": len(table),
            "requests_left_out": log.unanswered,
            "duration_s": span_s,
            "ttft_s": percentiles(table["ttft_s"]),
            "tpot_s": tpot,
            "itl_s": weighted_percentiles(*log.each_gap()),
            "e2e_s": percentiles(table["e2e_s"]),
            "queue_s": percentiles(table["queue_s"]),
            "requests_per_s": len(table) / span_s,
            "output_tokens_per_s": output / span_s,
            "output_tokens_per_s_per_gpu": output / span_s / spec.gpus,
            "output_tokens_per_s_per_user": 1.0 / tpot["mean"] if tpot and tpot["mean"] else None,
            "input_tokens_per_s": float(table["input_tokens"].sum()) / span_s,
            "goodput_per_s": None if good is None else good / span_s,
            "slo_share": None if good is None else good / len(table),
            "energy_j": self.energy_j,
            "energy_j_by_part": self.energy_j_by_part,
            "energy_j_per_output_token": self.energy_j / output,
            "energy_j_per_request": self.energy_j / len(table),
            "energy_wh_per_output_token": self.energy_j / output / J_PER_WH,
            "energy_wh_per_request": self.energy_j / len(table) / J_PER_WH,
            "power_w_per_gpu": self.energy_j / self.end_s / spec.gpus,
            "fleet_power_w_most": max((all_w for _, all_w, _ in log.fleet_looks), default=None),
            "gpu_hours": self._gpu_hours(),
            "replica_starts": log.starts,
            "tokens_per_step": self._tokens_per_step(table),
            "hit_tokens": (hits := int(table["hit_tokens"].sum())),
            "hit_share": hits / float(table["input_tokens"].sum()),
            "hit_tokens_by_tier": {"hbm": hits - sum(log.fetched.values())} | dict(log.fetched),
            "preemptions": int(table["preemptions"].sum()),
            "kv_blocks": blocks,
            "kv_block_tokens": spec.own_block_tokens(group),
            "kv_bytes_per_token_per_gpu": memory_of(spec, group, context=1).kv_bytes,
            **self._pipeline(),
            **self._adapters(),
            **self._images(table),
            "memory_bytes_per_gpu": self._memory(blocks, most_blocks),
            "most_blocks": most_blocks,
            "most_waiting": max(stretch.waiting for stretch in log.stretches),
        }

    def costs(self, prices: Prices) -> dict[str, float]:
        """What it costs and emits, whole, a million output tokens and a request, as far as ``prices`` say."""
        counts = {"million_output_tokens": self.requests["output_tokens"].sum() / 1e6, "request": len(self.requests)}
        return prices.of(energy_j=self.energy_j, gpu_s=self._gpu_hours() * S_PER_HOUR, counts=counts)

    @cached_property
    def utilisation(self) -> dict[str, float | None]:
        """FLOPs and HBM bytes of all GPUs, and their share of what the GPUs that were on could have done.

        As of a single run: ``mfu`` of the datasheet's dense rate for the type that products multiply in, ``mbu`` of its
        bandwidth. Contexts of decoding sequences are taken at their mean.
        """
        group, gpu = self.spec.group(), self.machine.gpu
        per_step = self._tokens_per_step(self.requests)
        work = served_work(stage_prices(self.spec, group), self.stretches, self.requests, 1.0 / (per_step or 1.0))
        gpu_s, peak = (
            self._gpu_hours() * S_PER_HOUR,
            gpu.tensor_flops_per_s.get(multiplied_type(resolve_scenario(group))),
        )
        return {
            "flops": work.flops,
            "hbm_bytes": work.hbm_bytes,
            "mfu": work.flops / (gpu_s * peak) if peak and gpu_s else None,
            "mbu": work.hbm_bytes / (gpu_s * gpu.hbm_bytes_per_s) if gpu_s else None,
        }

    def _memory(self, blocks: int, most_blocks: int) -> dict[str, float]:
        """Bytes of the fullest GPU: what it holds, its cache in full and at most in use."""
        need = memory_of(self.spec, self.spec.group(), context=self.spec.own_block_tokens(self.spec.group()))
        gpu = self.machine.gpu.memory_bytes
        held = {"weights": need.weight_bytes, "activations": need.activation_bytes, "kv_cache": need.kv_bytes * blocks}
        return held | {"kv_cache_most": need.kv_bytes * most_blocks, "room": gpu - sum(held.values()), "gpu": gpu}

    def _tokens_per_step(self, table: pd.DataFrame) -> float | None:
        """Mean tokens that a sequence yields in a step that checks drafted ones; None without speculation."""
        if self.spec.speculation is None or not (steps := int(self.log.each_gap()[1].sum())):
            return None
        return float(table["output_tokens"].sum() - len(table)) / steps

    def _images(self, table: pd.DataFrame) -> dict[str, Any]:
        """Of requests with images: how many, and the tokens that they are."""
        if "images" not in table:
            return {}
        return {"images": {"count": int(table["images"].sum()), "tokens": int(table["image_tokens"].sum())}}

    def _adapters(self) -> dict[str, Any]:
        """Of servers with adapters: their slots, and what came into them."""
        slots, asked = self.log.adapter_slots, [one.request.adapter for one in self.log.served]
        if not slots:
            return {}
        group = self.spec.group()
        return {
            "adapters": {
                "slots_per_replica": slots[0].slots,
                "asked_for": len(set(asked) - {-1}),
                "requests_with_one": sum(adapter >= 0 for adapter in asked),
                "bytes_per_gpu": group.lora_adapters * max(one.rank_bytes for one in own_sizes(group)),
                "loads": sum(one.loads for one in slots if one.stage == 0),
                "load_bytes": sum(one.loads * one.own_bytes for one in slots),
                "load_s": sum(one.load_s for one in slots),
            }
        }

    def _pipeline(self) -> dict[str, Any]:
        """Of replicas in stages: memory of a GPU of each, and how its time and joules were spent."""
        spec, group = self.spec, self.spec.group()
        if spec.pp == 1:
            return {}
        table = self.stretches
        seconds, works = table["end_s"] - table["start_s"], table["steps"] > 0
        moves = ~works & ((table["decoding"] > 0) | (table["prompt_tokens"] > 0))
        on_s = float(seconds.sum())
        needs = stage_needs(spec, group, context=1)
        layers = spec.layers or workloads.load_model(spec.model).layers
        return {
            "pipeline": {
                "stages": [
                    {
                        "layers": len(layout_of(group).stage_layers(layers, stage)),
                        "weight_bytes_per_gpu": needs[stage].weight_bytes,
                        "kv_bytes_per_token_per_gpu": needs[stage].kv_bytes,
                        "busy_share": float(seconds[works & here].sum() / seconds[here].sum()),
                        "energy_j": float(table["energy_j"][here].sum()),
                    }
                    for stage in range(spec.pp)
                    if (here := table["stage"] == stage).any()
                ],
                "transfer_share": float(seconds[moves].sum()) / on_s,
                "transfer_energy_j": float(table["energy_j"][moves].sum()),
                "bubble_share": float(seconds[~works & ~moves].sum()) / on_s,
                "bubble_energy_j": float(table["energy_j"][~works & ~moves].sum()),
            }
        }

    def _gpu_hours(self) -> float:
        """Hours of all GPUs that are on; a GPU in two partitions has two timelines, a stage one of its own."""
        gpus = {replica: self.spec.gpus_of(replica) for replica in {one.replica for one in self.log.stretches}}
        seconds = sum([(one.end_s - one.start_s) * gpus[one.replica] for one in self.log.stretches])
        return seconds / 3600.0 / self.spec.sides / self.spec.pp

    def _beyond(self, table: pd.DataFrame) -> int:
        """Requests that are longer than the model was made for, as far as it says."""
        model = workloads.load_model(self.spec.model)
        needed = (table["input_tokens"] + table["output_tokens"] - 1).tolist()
        return sum(workloads.beyond(model, tokens) for tokens in needed)

    def _good(self, table: pd.DataFrame) -> int | None:
        """Requests that met the service-level objective; None without one."""
        spec = self.spec
        if spec.slo_ttft_s is None and spec.slo_tpot_s is None:
            return None
        good = table["ttft_s"] <= (spec.slo_ttft_s or np.inf)
        good &= table["tpot_s"].fillna(0.0) <= (spec.slo_tpot_s or np.inf)
        return int(good.sum())


def percentiles(values: pd.Series[float]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing.

    >>> percentiles(pd.Series([1.0, 2.0, 3.0]))["p50"]
    2.0
    """
    if values.empty:
        return None
    found = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean())} | {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}


def weighted_percentiles(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[str, float] | None:
    """Mean and percentiles of ``values`` that occur ``counts`` times each.

    >>> weighted_percentiles(np.array([1.0, 5.0]), np.array([9, 1]))["p50"]
    1.0
    """
    if not len(values):
        return None
    order = np.argsort(values)
    ordered, weights = values[order], counts[order].astype(float)
    reached = np.cumsum(weights)
    at = [int(np.searchsorted(reached, p / 100 * reached[-1])) for p in PERCENTILES]
    mean = float((ordered * weights).sum() / reached[-1])
    return {"mean": mean} | {f"p{p}": float(ordered[i]) for p, i in zip(PERCENTILES, at, strict=True)}
