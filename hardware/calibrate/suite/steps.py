"""Whole-model steps with random weights: what ``wattline measure`` runs and validation compares with.

Layouts: tensor parallel with all-reduce, sequence parallel with chunked overlap, Ulysses context parallel,
two pipeline stages, expert parallel by all-reduce; prefill, decode and generate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hardware.calibrate.suite.layers import ExpertLayer, Layer, Projection, Rotary
from hardware.calibrate.suite.profiled import profile_steps
from hardware.calibrate.suite.routing import draw_routing
from hardware.calibrate.suite.shapes import HEAD_DIM, shape_of
from hardware.calibrate.suite.side_stream import SideStream
from hardware.calibrate.suite.steps_overlap import overlap_step
from hardware.calibrate.suite.timing import Bench, EventTimer, capture, steady, together
from hardware.errors import HardwareError

Row = Mapping[str, Any]
Step = Callable[[], None]
_STEP_WINDOW_S = 1.05


def measure_step(bench: Bench, row: Row) -> dict[str, Any]:
    """Latency, power and energy of a ``model_step`` row in the steady state."""
    facts: dict[str, Any] = {"tokens_per_ep_rank": None}
    step = build_step(bench, row, facts)
    if row.get("launch", "graph") == "eager":
        step()
        bench.synchronize()
        replay: Step = step
    else:
        replay = capture(bench, step)
    measured = together(bench, steady(bench, replay, 1, window_s=_STEP_WINDOW_S))
    if bench.traces is not None:
        profile_steps(bench, replay, bench.traces / f"{trace_name(row)}.rank{bench.comm.rank}.json.gz")
    return {**facts, **measured}


def trace_name(row: Row) -> str:
    """What a row's traces are called: its model and phase, and all that differs from one bf16 GPU in a graph.

    >>> trace_name({"model": "llama3-8b", "phase": "prefill", "batch": 1, "seq_len": 512, "tp": 2, "dtype": "bf16"})
    'llama3-8b-prefill-1x512-tp2'
    """
    switches = ("tp", "ep", "cp", "pp", "micro_batches", "overlap_chunks", "comm_ctas")
    layout = [f"{name}{row[name]}" for name in switches if row.get(name) not in (None, 1)]
    dtype = [] if row["dtype"] == "bf16" else [row["dtype"]]
    eager = ["eager"] if row.get("launch") == "eager" else []
    return "-".join([row["model"], row["phase"], f"{row['batch']}x{row['seq_len']}", *layout, *dtype, *eager])


def measure_generate(bench: Bench, row: Row) -> dict[str, Any]:
    """Prefill then ``output_len`` - 1 decode steps, repeated; ``ttft_s`` is the prefill's share.

    The first output token comes from the prefill; decode step j attends over seq_len + j tokens.
    """
    model = _Dense(bench, row, cache_tokens=row["seq_len"] + row["output_len"])
    prefill = capture(bench, model.prefill)
    decodes = [capture(bench, _decode_of(model, row["seq_len"] + j)) for j in range(1, int(row["output_len"]))]
    timer = EventTimer(bench)
    firsts: list[tuple[Any, Any]] = []

    def replay() -> None:
        start = timer.record()
        prefill()
        firsts.append((start, timer.record()))
        for decode in decodes:
            decode()

    measured = together(bench, steady(bench, replay, 1, window_s=_STEP_WINDOW_S))
    last = [timer.seconds(start, end) for start, end in firsts[-2:]]
    return {"ttft_s": max(bench.comm.share(sum(last) / len(last))), **measured}


def build_step(bench: Bench, row: Row, facts: dict[str, Any]) -> Step:
    """One step of a row as a function that launches it on the current stream."""
    if row.get("sequence_parallel"):
        return overlap_step(bench, row)
    if row.get("cp", 1) > 1:
        return _ulysses_step(bench, row)
    if row.get("pp", 1) > 1:
        return _pipeline_step(bench, row)
    model = _Dense(bench, row, cache_tokens=row["seq_len"] if row["phase"] == "decode" else 0)
    if model.rows_per_rank is not None:
        facts["tokens_per_ep_rank"] = model.rows_per_rank
    match row["phase"]:
        case "prefill":
            return model.prefill
        case "decode":
            return lambda: model.decode(row["seq_len"])
        case other:
            raise HardwareError(f"phase = '{other}': a model_step is prefill or decode")


def _decode_of(model: _Dense, cached: int) -> Step:
    return lambda: model.decode(cached)


class _Dense:
    """A model whose ranks all hold all tokens: alone, tensor parallel, or expert parallel by all-reduce."""

    def __init__(self, bench: Bench, row: Row, *, cache_tokens: int) -> None:
        shape = shape_of(row["model"], bench.shapes)
        self._bench = bench
        self._batch, self._seq_len = int(row["batch"]), int(row["seq_len"])
        self._tp, ep = int(row.get("tp", 1)), int(row.get("ep", 1))
        fp8 = row["dtype"] == "fp8_e4m3"
        if ep > 1 and row.get("ep_mode") != "all_reduce":
            raise HardwareError(f"ep_mode = '{row.get('ep_mode')}': the suite runs expert parallelism by all_reduce")
        tokens = self._batch * (1 if row["phase"] == "decode" else self._seq_len)
        self.rows_per_rank: list[int] | None = None
        experts: list[ExpertLayer] = []

        def forward_of(layer: int) -> Callable[[], ExpertLayer] | None:
            if not shape.experts:
                return None

            def make() -> ExpertLayer:
                count, rank = shape.experts // ep, bench.comm.rank if ep > 1 else 0
                routing = draw_routing(
                    tokens=tokens,
                    experts=shape.experts,
                    top_k=shape.top_k,
                    skew=float(row.get("expert_skew", 0.0)),
                    own=range(rank * count, (rank + 1) * count),
                    seed=layer,
                )
                made = ExpertLayer(bench, shape, routing, ep=ep)
                experts.append(made)
                return made

            return make

        cache = (self._batch, cache_tokens) if cache_tokens else None
        self._layers = [
            Layer(bench, shape, tp=self._tp, fp8=fp8, cache=cache, forward=forward_of(i)) for i in range(row["layers"])
        ]
        if ep > 1:
            mean = sum(e.rows for e in experts) / len(experts)
            self.rows_per_rank = [round(r) for r in bench.comm.share(mean)]
        vocabulary = shape.vocabulary // self._tp
        self._head = Projection(bench, vocabulary, shape.width) if row.get("lm_head") else None
        self._rotary = Rotary(bench, max(self._seq_len, 1))
        self._reduce = max(self._tp, ep) > 1
        # One stream of tokens a phase: generate runs both on the same weights.
        self._streams = {
            count: (bench.randn(count, shape.width), bench.randn(count, shape.width)) for count in {tokens, self._batch}
        }

    def prefill(self) -> None:
        """All prompt tokens; the head on each sequence's last token."""
        self._run(self._batch * self._seq_len, cached=None)

    def decode(self, cached: int) -> None:
        """One token a sequence over ``cached`` tokens, itself included."""
        self._run(self._batch, cached=cached)

    def _run(self, tokens: int, cached: int | None) -> None:
        bench, (x, residual) = self._bench, self._streams[tokens]
        for layer in self._layers:
            qkv = layer.qkv(layer.norm_attention(x, residual))
            self._rotary(qkv, layer.q_heads + layer.kv_heads)
            if cached is None:
                attended = layer.attend_prompt(bench, qkv, self._batch)
            else:
                attended = layer.attend_token(bench, qkv, cached)
            x = layer.out(attended)
            if self._reduce and self._tp > 1:
                bench.comm.all_reduce_sum(x)
            x = layer.feed_forward(layer.norm_ff(x, residual))
            if self._reduce:
                bench.comm.all_reduce_sum(x)
        if self._head is not None:
            last = x.view(self._batch, tokens // self._batch, -1)[:, -1]
            self._head(last)


def _ulysses_step(bench: Bench, row: Row) -> Step:
    """Context parallel prefill: tokens/n rows everywhere, all tokens of heads/n inside attention."""
    shape, n = shape_of(row["model"], bench.shapes), int(row["cp"])
    batch, seq_len = int(row["batch"]), int(row["seq_len"])
    if batch != 1 or row["phase"] != "prefill" or row.get("lm_head"):
        raise HardwareError("cp > 1: the suite runs a prefill of batch = 1 without lm_head")
    own = seq_len // n
    fp8 = row["dtype"] == "fp8_e4m3"
    layers = [Layer(bench, shape, tp=1, fp8=fp8) for _ in range(row["layers"])]
    rotary = Rotary(bench, own)
    x0, residual = bench.randn(own, shape.width), bench.randn(own, shape.width)
    q_heads, kv_heads = shape.q_heads // n, shape.kv_heads // n
    heads = q_heads + 2 * kv_heads

    def step() -> None:
        x = x0
        for layer in layers:
            qkv = layer.qkv(layer.norm_attention(x, residual))
            rotary(qkv, shape.q_heads + shape.kv_heads)
            # The fused weight's rows are ordered rank by rank, so that one copy sorts tokens by target rank.
            by_rank = qkv.view(own, n, heads * HEAD_DIM).transpose(0, 1).contiguous()
            arrived = bench.torch.empty_like(by_rank)
            bench.comm.collective("all_to_all", by_rank.view(-1), arrived.view(-1), row.get("comm_ctas"))
            view = arrived.view(1, seq_len, heads, HEAD_DIM)
            q, k, v = (part.transpose(1, 2) for part in view.split([q_heads, kv_heads, kv_heads], dim=2))
            out = bench.kernels.attention(q, k, v, causal=True)
            sent = out.transpose(1, 2).reshape(n, own, q_heads * HEAD_DIM)
            back = bench.torch.empty_like(sent)
            bench.comm.collective("all_to_all", sent.reshape(-1), back.view(-1), row.get("comm_ctas"))
            x = layer.out(back.transpose(0, 1).reshape(own, -1))
            x = layer.feed_forward(layer.norm_ff(x, residual))

    return step


def _pipeline_step(bench: Bench, row: Row) -> Step:
    """Two stages over micro-batches; activations travel on a second stream; a step ends when both are done."""
    shape, stages, parts = shape_of(row["model"], bench.shapes), int(row["pp"]), int(row["micro_batches"])
    if stages != 2 or row["phase"] != "prefill" or row["batch"] % parts:
        raise HardwareError("pp: the suite runs a prefill in 2 stages whose batch is a multiple of micro_batches")
    batch, seq_len, rank = row["batch"] // parts, int(row["seq_len"]), bench.comm.rank
    tokens = batch * seq_len
    count = row["layers"] // 2 + (row["layers"] % 2 if rank == 1 else 0)
    layers = [Layer(bench, shape, tp=1, fp8=row["dtype"] == "fp8_e4m3") for _ in range(count)]
    rotary = Rotary(bench, seq_len)
    head = Projection(bench, shape.vocabulary, shape.width) if row.get("lm_head") and rank == 1 else None
    inputs = [bench.randn(tokens, shape.width) for _ in range(parts)]
    outputs = [bench.empty(tokens, shape.width) for _ in range(parts)]
    residual = bench.randn(tokens, shape.width)
    done = bench.torch.zeros(8, device=bench.device, dtype=bench.torch.bfloat16)
    side = SideStream(bench)

    def compute(part: int) -> None:
        x = inputs[part]
        for layer in layers:
            qkv = layer.qkv(layer.norm_attention(x, residual))
            rotary(qkv, layer.q_heads + layer.kv_heads)
            x = layer.out(layer.attend_prompt(bench, qkv, batch))
            x = layer.feed_forward(layer.norm_ff(x, residual))
        if head is not None:
            head(x.view(batch, seq_len, -1)[:, -1])
        if rank == 0:
            outputs[part].copy_(x)

    def step() -> None:
        side.fork()
        if rank == 0:
            for part in range(parts):
                compute(part)
                side.run_after_main(partial(bench.comm.exchange, outputs[part], 1, None, 1))
        else:
            arrived = [side.run(partial(bench.comm.exchange, None, 0, inputs[part], 0)) for part in range(parts)]
            for part in range(parts):
                side.main_waits(arrived[part])
                compute(part)
        side.join()
        # Without this the next step's first micro-batches would hide in this one's tail.
        bench.comm.all_reduce_sum(done)

    return step
