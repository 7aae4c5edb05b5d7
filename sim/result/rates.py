"""A run in the words of the trade: TTFT, TPOT, tokens a second, MFU, MBU, memory, joules a token and a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import workloads
from sim.build.cost import flops_of
from sim.result.exposure import S_PER_PS
from sim.result.prices import Prices
from sim.scenario.layout import layout_of
from sim.scenario.memory import MemoryUse, memory_need, memory_use
from sim.scenario.precision import precision_of
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from sim.scenario.speculation import acceptances
from sim.scenario.video import video_summary

if TYPE_CHECKING:
    from sim.result.run import Run

J_PER_WH = 3600.0


def generation(run: Run) -> dict[str, float]:
    """Time and energy to first token, time and energy per output token; the parts sum to the whole."""
    assert run.scenario.output_len is not None
    ttft_s = run.outcome.phase_end_ps("prefill") * S_PER_PS
    first_j = run.energy_until(ttft_s)
    steps = run.scenario.output_len - 1
    return {
        "ttft_s": ttft_s,
        "energy_to_first_token_j": first_j,
        "tpot_s": (run.latency_s - ttft_s) / steps if steps else 0.0,
        "decode_energy_j": run.energy_j - first_j,
    }


def times(run: Run) -> dict[str, float]:
    """Time to first token and time per output token (s), as far as the phase has them."""
    match run.scenario.phase:
        case "prefill":
            return {"ttft_s": run.latency_s}
        case "decode":
            return {"tpot_s": run.latency_s / workloads.tokens_a_step(acceptances(run.scenario))}
        case "generate":
            return generation(run)
        case _:
            return {}


def rates(run: Run) -> dict[str, float]:
    """Tokens a second and joules a token and a request, one sequence of the batch; a decode step is no request.

    Tokens are those processed (prefill, train), produced (decode, generate) or denoised; ``per_user`` is what one
    sequence sees. Wh are joules over 3,600.
    """
    per_s = run.tokens / run.latency_s
    # Where experts exchange tokens, each tensor group has a batch of its own.
    sequences = run.scenario.batch * layout_of(run.scenario).own_batches
    found = {
        "tokens_per_s": per_s,
        "tokens_per_s_per_gpu": per_s / run.gpus,
        "tokens_per_s_per_user": per_s / sequences,
        "energy_wh_per_token": run.energy_j / run.tokens / J_PER_WH,
    }
    if run.scenario.phase != "decode":
        per_request_j = run.energy_j / sequences
        found |= {"energy_j_per_request": per_request_j, "energy_wh_per_request": per_request_j / J_PER_WH}
    return found


def costs(run: Run, prices: Prices) -> dict[str, float]:
    """What the run costs and emits, whole, a million tokens and a request, as far as ``prices`` say."""
    found = rates(run)
    counts = {"million_tokens": run.tokens / 1e6}
    if "energy_j_per_request" in found:
        counts["request"] = run.energy_j / found["energy_j_per_request"]
    return prices.of(energy_j=run.energy_j, gpu_s=run.latency_s * run.gpus, counts=counts)


def utilisation(run: Run) -> dict[str, float | None]:
    """FLOPs and HBM bytes of all GPUs, and their share of what the GPUs could do in the time of the run.

    ``mfu`` is over the datasheet's dense rate at its boost clock for :func:`multiplied_type`,
    ``mfu_at_clock`` over the rate at the mean clock that the run had (None where the datasheet gives no rate for the
    type); ``mbu`` is over the datasheet's bandwidth.
    """
    flops = run.outcome.over_kernels(flops_of)
    hbm_bytes = run.outcome.over_kernels(lambda cls: cls.terms.hbm_bytes)
    gpu, gpu_s = run.machine.gpu, run.latency_s * run.gpus
    peak = gpu.tensor_flops_per_s.get(multiplied_type(run.scenario))
    clock_hz = sum(run.sm_clock_hz_per_gpu) / run.gpus
    return {
        "flops": flops,
        "hbm_bytes": hbm_bytes,
        "flops_per_hbm_byte": flops / hbm_bytes if hbm_bytes else None,
        "mfu": flops / (gpu_s * peak) if peak else None,
        "mfu_at_clock": flops / (gpu_s * peak) * gpu.reference_clock_hz / clock_hz if peak else None,
        "mbu": hbm_bytes / (gpu_s * gpu.hbm_bytes_per_s),
    }


def row_of(run: Run) -> dict[str, float | None]:
    """What a row of a table says of a run: its rates, what it used of the GPUs, and bytes of the fullest one."""
    seen, used, need_bytes = rates(run), utilisation(run), held_bytes(run)
    names = ("tokens_per_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user", "energy_wh_per_token")
    return {
        **{name: seen[name] for name in names},
        **{name: used[name] for name in ("mfu", "mfu_at_clock", "mbu", "flops_per_hbm_byte")},
        "memory_need_bytes_per_gpu": need_bytes,
        "memory_room_bytes_per_gpu": run.machine.gpu.memory_bytes - need_bytes,
    }


def memory(run: Run) -> MemoryUse | None:
    """What the fullest GPU holds; None of a denoising run, whose summary says it itself."""
    return memory_use(resolve_scenario(run.scenario)) if run.scenario.phase != "denoise" else None


def held_bytes(run: Run) -> float:
    """What the fullest GPU holds: :func:`memory` without the largest batch, which takes a search."""
    if run.scenario.phase == "denoise":
        return float(video_summary(run.scenario)["memory_bytes_per_gpu"])
    return memory_need(resolve_scenario(run.scenario)).bytes


def multiplied_type(scenario: Scenario) -> str:
    """The type that products of weights multiply in."""
    return scenario.dtype if scenario.phase == "denoise" else precision_of(scenario).product.multiplies.value
