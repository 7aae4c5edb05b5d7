"""Steps of a real vLLM server with random weights, and requests it serves: seconds, watts, clocks, profiler traces.

The server runs in this process's event loop (vLLM starts its own workers). Prompts are random tokens, weights random
(``load_format=dummy``), prefixes are not cached. Power is the slope of NVML's energy counter over the settled part.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from hardware.calibrate.suite.adapters_vllm import RandomAdapters, write_adapters
from hardware.calibrate.suite.meter import Meter, NvmlMeter
from hardware.errors import HardwareError

NEEDS_VLLM = "measuring vLLM needs it beside wattline: pip install 'wattline[vllm]'"
# Tokens that each sequence of a decode row generates; what comes before the settled part is left out.
DECODE_TOKENS, DECODE_WARM_UP = 400, 0.15
# Batches of prompts that a prefill row sends; the first quarter warms up.
PREFILL_BATCHES = 24
# A profile begins so long after every sequence generates, and lasts so long (s).
PROFILE_AFTER_S, PROFILE_FOR_S = 0.5, 0.4
FIRST_TOKEN, LAST_TOKEN = 100, 30_000  # random prompts draw from these


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Tokens drafted before each step by ``method``; each passes with a chance of ``rates``, all before it included.

    ``model`` is a folder with the draft's ``config.json``. vLLM draws what passes, whatever its random weights say.
    """

    method: Literal["draft_model", "eagle"]
    model: Path
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What server to start: ``model`` is a folder with a ``config.json``; ``gpus`` hold its layers in ``stages``.

    ``context_ranks`` of a tensor-parallel group share out each sequence's keys and values (decode context parallelism).
    Requests ask for ``adapters`` in turn, those of :class:`Serve` for their own.
    """

    model: Path
    vocabulary: int
    gpus: int = 1
    stages: int = 1
    context_ranks: int = 1
    expert_parallel: bool = False
    dtype: str = "bf16"
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    drafts: Drafts | None = None
    adapters: RandomAdapters | None = None
    traces: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """``batch`` sequences of ``seq_len`` cached tokens on average."""

    batch: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Steps of ``batch`` prompts of ``seq_len`` tokens."""

    batch: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Requests as they arrive: seconds, prompt tokens, tokens to generate.

    ``adapters`` are the numbers of those that they ask for, -1: none; empty: nobody asks for one.
    """

    requests: tuple[tuple[float, int, int], ...]
    adapters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lone:
    """Prompts of ``seq_len`` tokens sent ``repeats`` times, each after the first token of the one before."""

    seq_len: int
    repeats: int = 30


Work = Decode | Prefill | Serve | Lone
Stamps = list[tuple[float, int]]  # when so many tokens of a request were there


@dataclass(slots=True)
class _MeteredServer:
    """A running server, its meters, and random prompts."""

    vllm: Any
    engine: Any
    spec: ServerSpec
    meters: Sequence[Meter]
    draw: random.Random
    adapters: Sequence[Any] = ()
    sent: int = 0

    def prompt(self, tokens: int) -> list[int]:
        return [self.draw.randrange(FIRST_TOKEN, min(LAST_TOKEN, self.spec.vocabulary)) for _ in range(tokens)]

    async def request(
        self, tokens: int, count: int, at_s: float | None = None, adapter: int | None = None
    ) -> tuple[float, Stamps]:
        """Send one request, at once or at ``at_s``; when it was sent and when its tokens came.

        It asks for the ``adapter`` of that number, for none (-1), or for the next in turn (None).
        """
        if at_s is not None:
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        self.sent += 1
        sampling = self.vllm.SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False
        )
        sent_s, stamps, seen = time.monotonic(), [], 0
        prompt = {"prompt_token_ids": self.prompt(tokens)}
        number = self.sent % max(len(self.adapters), 1) if adapter is None else adapter
        asked = {"lora_request": self.adapters[number]} if self.adapters and number >= 0 else {}
        async for output in self.engine.generate(prompt, sampling, f"wattline-{self.sent}", **asked):
            now = len(output.outputs[0].token_ids)
            if now > seen:
                stamps.append((time.monotonic(), now))
                seen = now
        if not stamps:
            raise HardwareError("vLLM ended a request without a token")
        return sent_s, stamps

    def metered(self, start_s: float, end_s: float) -> dict[str, Any]:
        """What the meters saw of a window: fields of a record."""
        return {
            "power_w": [meter.power_w(start_s, end_s) for meter in self.meters],
            "sm_clock_mhz": [meter.sm_clock_mhz(start_s, end_s) for meter in self.meters],
            "temperature_c": [meter.temperature_c() for meter in self.meters],
        }


def measure_engine(spec: ServerSpec, works: Sequence[Work]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Start the server, run ``works``, and stop it: what it is, and measured fields of each work.

    With ``spec.traces`` a profiler trace of the settled steps goes there. Raises :class:`HardwareError` without vLLM.
    """
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError:
        raise HardwareError(NEEDS_VLLM) from None
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Random gates route unlike trained ones; rows are to be predicted with routing = uniform.
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")

    adapters = _requests_for(spec)

    async def run() -> list[dict[str, Any]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(spec)))
        try:
            with _meters(spec.gpus) as meters:
                server = _MeteredServer(vllm, engine, spec, meters, random.Random(7), adapters)
                await asyncio.gather(*(server.request(64, 32) for _ in range(8)))  # a batch that decodes
                for tokens in warm_up_prompts(spec):
                    await server.request(tokens, 1)
                return [await _measured(server, work) for work in works]
        finally:
            engine.shutdown()

    return {"engine": "vllm", "engine_version": str(vllm.__version__)}, asyncio.run(run())


def _requests_for(spec: ServerSpec) -> list[Any]:
    """A ``LoRARequest`` for each of the server's adapters, whose files are written first."""
    if spec.adapters is None:
        return []
    from vllm.lora.request import LoRARequest

    folders = write_adapters(spec.adapters, spec.model)
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, start=1)]


def arguments(spec: ServerSpec) -> dict[str, Any]:
    """Arguments of the engine: as users start it, with random weights and without a cache of prefixes."""
    found: dict[str, Any] = {
        "model": str(spec.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": spec.gpus // spec.stages,
        "pipeline_parallel_size": spec.stages,
        "enable_expert_parallel": spec.expert_parallel,
        "enable_prefix_caching": False,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "gpu_memory_utilization": 0.9,
    }
    if spec.dtype == "fp8_e4m3":
        found["quantization"] = "fp8"
    if spec.context_ranks > 1:
        found["decode_context_parallel_size"] = spec.context_ranks
    if spec.adapters is not None:
        slots = spec.adapters.slots or spec.adapters.count
        found |= {"enable_lora": True, "max_loras": slots, "max_lora_rank": spec.adapters.rank}
    if spec.drafts is not None:
        found["speculative_config"] = {
            "method": spec.drafts.method,
            "model": str(spec.drafts.model),
            "num_speculative_tokens": len(spec.drafts.rates),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(spec.drafts.rates),
        }
    if spec.traces is not None:
        spec.traces.mkdir(parents=True, exist_ok=True)
        found["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(spec.traces),
            "torch_profiler_with_stack": False,
            "torch_profiler_record_shapes": True,
            "ignore_frontend": True,
        }
    return found


def warm_up_prompts(spec: ServerSpec) -> list[int]:
    """Lengths of prompts, sent one by one, that run a step of every size: no kernel is compiled in a measurement.

    Triton compiles a kernel anew for each bucket of rows and for rows of odd number; the first ten seconds of a
    mixture's server went into that (on an H200 time to first token 1.5 s instead of 0.1 s).
    """
    powers = [1 << power for power in range(4, spec.max_num_batched_tokens.bit_length())]
    return [tokens for power in powers for tokens in (power, power + 1) if tokens < spec.max_model_len]


async def _measured(server: _MeteredServer, work: Work) -> dict[str, Any]:
    match work:
        case Decode():
            return await _decode(server, work)
        case Prefill():
            return await _prefill(server, work)
        case Serve():
            return await _serve(server, work)
        case Lone():
            return await _lone(server, work)
    assert_never(work)


async def _decode(server: _MeteredServer, work: Decode) -> dict[str, Any]:
    """Seconds between tokens of the last request to start, once all generate."""
    prompt = max(1, work.seq_len - DECODE_TOKENS // 2)
    tasks = [asyncio.ensure_future(server.request(prompt, DECODE_TOKENS)) for _ in range(work.batch)]
    done = [stamps for _, stamps in await asyncio.gather(*tasks)]
    first, last = max(stamps[0][0] for stamps in done), min(stamps[-1][0] for stamps in done)
    start = first + DECODE_WARM_UP * (last - first)
    settled = [stamp for stamp in max(done, key=lambda stamps: stamps[0][0]) if start <= stamp[0] <= last]
    if len(settled) < 2:
        raise HardwareError(
            f"batch = {work.batch}, seq_len = {work.seq_len}: the sequences never all generate at once: fewer fit "
            "the cache: give a smaller batch"
        )
    (from_s, before), (to_s, after) = settled[0], settled[-1]
    if server.spec.traces is not None:
        # All generate by now if as many tokens went by as before.
        again = [asyncio.ensure_future(server.request(prompt, 2 * DECODE_TOKENS)) for _ in range(work.batch)]
        await _profiled(server, (first - min(stamps[0][0] for stamps in done)) + PROFILE_AFTER_S)
        await asyncio.gather(*again)
    return {
        "latency_s": (to_s - from_s) / (after - before),
        "mean_context": prompt + (before + after) / 2,
        **server.metered(start, last),
    }


async def _prefill(server: _MeteredServer, work: Prefill) -> dict[str, Any]:
    """Seconds of a batch of prompts, by the first tokens of the last three quarters."""

    async def send(batches: int) -> list[float]:
        done = await asyncio.gather(*(server.request(work.seq_len, 1) for _ in range(batches * work.batch)))
        return sorted(stamps[0][0] for _, stamps in done)

    firsts = await send(PREFILL_BATCHES)
    start, end = firsts[len(firsts) // 4], firsts[-1]
    settled = [at for at in firsts if at > start]
    if server.spec.traces is not None:
        again = asyncio.ensure_future(send(PREFILL_BATCHES))
        await _profiled(server, (end - firsts[0]) / 4)
        await again
    return {"latency_s": (end - start) * work.batch / len(settled), **server.metered(start, end)}


async def _serve(server: _MeteredServer, work: Serve) -> dict[str, Any]:
    """Time to first token and per token of each request, joules from the first arrival to the last token."""
    began = time.monotonic() + 0.5
    asked = work.adapters or (-1,) * len(work.requests)
    one_by_one = zip(work.requests, asked, strict=True)
    done = await asyncio.gather(*(server.request(i, o, began + at, number) for (at, i, o), number in one_by_one))
    end = max(stamps[-1][0] for _, stamps in done)
    return {
        "latency_s": end - began,
        "ttft_s": [stamps[0][0] - sent for sent, stamps in done],
        "tpot_s": [
            (stamps[-1][0] - stamps[0][0]) / (stamps[-1][1] - stamps[0][1]) if stamps[-1][1] > stamps[0][1] else 0.0
            for _, stamps in done
        ],
        **server.metered(began, end),
    }


async def _lone(server: _MeteredServer, work: Lone) -> dict[str, Any]:
    """Seconds to the first token of each prompt, nothing else in the server."""
    begin, ttft_s = time.monotonic(), []
    for _ in range(work.repeats):
        sent, stamps = await server.request(work.seq_len, 1)
        ttft_s.append(stamps[0][0] - sent)
    return {"latency_s": statistics.median(ttft_s), "ttft_s": ttft_s, **server.metered(begin, time.monotonic())}


async def _profiled(server: _MeteredServer, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await server.engine.start_profile()
    await asyncio.sleep(PROFILE_FOR_S)
    await server.engine.stop_profile()


@contextmanager
def _meters(gpus: int) -> Iterator[Sequence[Meter]]:
    meters = [NvmlMeter(index=index) for index in visible(os.environ, gpus)]
    for meter in meters:
        meter.start()
    try:
        yield meters
    finally:
        for meter in meters:
            meter.stop()


def visible(environment: Mapping[str, str], gpus: int) -> list[int]:
    """NVML's indices of the first ``gpus`` GPUs that CUDA shows.

    >>> visible({"CUDA_VISIBLE_DEVICES": "2,3"}, 1), visible({}, 2)
    ([2], [0, 1])
    """
    shown = environment.get("CUDA_VISIBLE_DEVICES", "")
    indices = [int(part) for part in shown.split(",") if part.strip().isdigit()] or list(range(gpus))
    if len(indices) < gpus:
        raise HardwareError(f"CUDA_VISIBLE_DEVICES = '{shown}': shows {len(indices)} GPUs, {gpus} are needed")
    return indices[:gpus]
