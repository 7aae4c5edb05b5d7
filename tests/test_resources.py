"""Every resource decides: another capacity or another rule in the engine changes the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from simpy import Environment, Event
from simpy.resources.base import BaseResource

from hardware.network import Port, Streams
from sim.engine.driver import Engine
from sim.engine.graph import KernelGraph, Transit
from sim.engine.resources.copy_engine import CopyEngine
from sim.engine.resources.hbm import Hbm, HbmShares
from sim.engine.resources.link_port import LinkPort, LinkShares
from sim.engine.resources.network import Crossing, Network, NetworkPort
from sim.engine.resources.sm_pool import Blocks, SmPool
from sim.engine.resources.stream import Stream
from tests.engine_kit import COMPUTE, COPY, REDUCE, core_of, graph, run, spans, with_terms

Change = Callable[[Engine], None]
Rows = list[tuple[str, int, float, float]]


def changed(g: KernelGraph, change: Change) -> Rows:
    """Spans of a run whose resources were changed before it."""
    engine = Engine(core_of(g))
    change(engine)
    return spans(g, engine.run())


class LastComes(SmPool):
    """A pool that serves whoever asked last."""

    def arbitrate(self) -> None:
        """Turn the queue round."""
        self.put_queue.reverse()
        super().arbitrate()


def test_a_pool_of_fewer_sms_or_of_another_order_changes_the_timeline() -> None:
    g = graph((0, [COMPUTE]), (0, [COPY]))
    assert spans(g, run(g)) == [("gemm", 0, 0.0, 10.0), ("copy", 0, 10.0, 20.0)]

    def fewer(engine: Engine) -> None:
        engine.core.gpus[0].pools = [SmPool(engine.env, 50, engine.rounds)]

    def other_order(engine: Engine) -> None:
        engine.core.gpus[0].pools = [LastComes(engine.env, 100, engine.rounds)]

    # Half of the product's blocks start at first; the others are the next in the queue.
    assert changed(g, fewer) == [("gemm", 0, 0.0, 20.0), ("copy", 0, 20.0, 30.0)]
    assert changed(g, other_order)[0] == ("copy", 0, 0.0, 10.0)


def test_blocks_of_a_kernel_that_runs_come_before_kernels_that_asked_later() -> None:
    """A kernel that began on a few SMs does not starve behind a stream of others that end and begin at once."""
    env = Environment()
    pool = SmPool(env, 100)
    began: list[tuple[str, float, float]] = []

    def repeated(name: str, count: int) -> Iterator[Event]:
        for _ in range(count):
            blocks = pool.request(90)
            yield blocks
            began.append((name, env.now, blocks.held))
            yield env.timeout(10)
            yield pool.release(blocks)

    def long(name: str) -> Iterator[Event]:
        yield env.timeout(1)
        blocks = pool.request(50)
        yield blocks
        began.append((name, env.now, blocks.held))
        yield env.timeout(11)
        began.append((name, env.now, blocks.held))

    env.process(repeated("product", 2))
    env.process(long("attention"))
    env.run()
    assert began == [("product", 0, 90), ("attention", 1, 10), ("product", 10, 50), ("attention", 12, 50)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTakesAll(HbmShares):
    """Memory that serves one kernel after another."""

    def divide(self, asked: Sequence[float], _weights: Sequence[float]) -> list[float]:
        """All that is left, in turn."""
        left, granted = self.bytes_per_s, []
        for want in asked:
            granted.append(max(1.0, min(want, left)))
            left -= granted[-1]
        return granted


def memory(shares: HbmShares) -> Change:
    def change(engine: Engine) -> None:
        engine.core.gpus[0].hbm = Hbm(engine.env, shares, paced=True)

    return change


def test_memory_of_another_rate_or_rule_changes_the_timeline() -> None:
    g = graph((0, [COPY]), (0, [replace(COPY, name="other")]))
    assert [end for *_, end in spans(g, run(g))] == [20.0, 20.0]
    assert [end for *_, end in changed(g, memory(HbmShares(bytes_per_s=5e11)))] == [40.0, 40.0]
    ends = {name: end for name, *_, end in changed(g, memory(FirstTakesAll(bytes_per_s=1e12)))}
    assert ends == {"copy": 10.0, "other": pytest.approx(20.0, abs=1e-3)}


def test_a_slower_port_changes_the_timeline() -> None:
    g = graph((0, [(REDUCE, 0)]), (0, [(replace(REDUCE, name="other"), 1)]))
    assert [end for *_, end in spans(g, run(g))] == [20.0, 20.0]

    def slower(engine: Engine) -> None:
        engine.core.gpus[0].port = LinkPort(engine.env, LinkShares(bytes_per_s=4e10), paced=True)

    assert [end for *_, end in changed(g, slower)] == [50.0, 50.0]


class FirstThrough(NetworkPort):
    """A port that lets one transfer through before the others."""

    def _do_put(self, event: Crossing) -> bool:
        if not event.decided:
            event.go(max(1.0, min(event.demand, self.left)))
        return True


def test_a_network_port_of_another_rate_or_rule_changes_the_timeline() -> None:
    port = Port(name="leaf0 to spine0", tier="leaf", bytes_per_s=1e11)
    streams = Streams(crossing=((port, 1.0),), of_rank=1, switches=0)
    sums = [
        replace(
            with_terms(REDUCE, link_bytes=0.0, floor_s=1e-5),
            name=name,
            transit=Transit(ranks=(0, 1), streams=streams, stream_bytes=1e6),
        )
        for name in ("first", "second")
    ]
    g = graph(*((gpu, [(sums[number], number)]) for number in (0, 1) for gpu in (0, 1)))

    def ends(kind: type[NetworkPort] | None = None, bytes_per_s: float = 1e11) -> dict[str, float]:
        def other(engine: Engine) -> None:
            assert engine.core.between is not None
            if kind is not None:
                engine.core.between.network.ports[port] = kind(
                    engine.env, Port(name=port.name, tier="leaf", bytes_per_s=bytes_per_s)
                )

        return {name: end for name, *_, end in changed(g, other)}

    assert ends() == {"first": 20.0, "second": 20.0}
    assert ends(NetworkPort, 5e10) == {"first": 40.0, "second": 40.0}
    assert ends(FirstThrough) == pytest.approx({"first": 10.0, "second": 20.0}, abs=1e-3)


def test_one_copy_engine_does_one_copy_after_the_other() -> None:
    copy = with_terms(COPY, sms_per_block=0.0, quantised=False, hbm_bytes=1e6, hbm_bytes_per_s=1e11)
    g = graph((0, [copy]), (0, [copy]))
    assert [end for *_, end in spans(g, run(g))] == [10.0, 10.0]

    def one(engine: Engine) -> None:
        engine.core.gpus[0].copy_engine = CopyEngine(engine.env, 1, engine.rounds)

    assert changed(g, one) == [("copy", 0, 0.0, 10.0), ("copy", 0, 10.0, 20.0)]


def test_a_stream_hands_out_one_kernel_at_a_time_and_holds_the_host_back_when_full() -> None:
    env, log = Environment(), []
    stream = Stream(env, capacity=1)

    def host() -> object:
        for name in "abc":
            yield stream.launch([name])
            log.append((env.now, f"launched {name}"))

    def front_end() -> object:
        for _ in range(3):
            kernel = yield stream.turn()
            yield env.timeout(5)
            log.append((env.now, f"ended {kernel}"))
            stream.end()

    env.process(host())  # type: ignore[arg-type]
    env.process(front_end())  # type: ignore[arg-type]
    env.run()
    assert [line for line in log if "launched" in line[1]] == [(0, "launched a"), (0, "launched b"), (5, "launched c")]
    assert [line for line in log if "ended" in line[1]] == [(5, "ended a"), (10, "ended b"), (15, "ended c")]


def test_a_second_front_end_of_a_stream_waits_for_the_first_ones_kernel() -> None:
    class TwoAtOnce(Stream):
        """A stream that forgets what it has handed out."""

        def _do_get(self, event: object) -> bool:
            done = super()._do_get(event)  # type: ignore[arg-type]
            self.busy = False
            return done

    def starts(kind: type[Stream]) -> list[float]:
        env, found = Environment(), []
        stream = kind(env)

        def front_end() -> object:
            yield stream.turn()
            found.append(env.now)
            yield env.timeout(5)
            stream.end()

        stream.launch(["a", "b"])
        for _ in range(2):
            env.process(front_end())  # type: ignore[arg-type]
        env.run()
        return found

    assert starts(Stream) == [0, 5] and starts(TwoAtOnce) == [0, 0]


def test_a_pool_arbitrates_once_an_instant_whatever_the_order_of_requests() -> None:
    class Counted(SmPool):
        rounds_held = 0

        def arbitrate(self) -> None:
            self.rounds_held += 1
            super().arbitrate()

    def order(wants: Sequence[tuple[str, int]]) -> tuple[list[str], int]:
        env, names = Environment(), []
        pool = Counted(env, 100)

        def kernel(name: str, priority: int) -> object:
            blocks = pool.request(100, priority=priority)
            yield blocks
            names.append(name)
            yield env.timeout(1)
            yield pool.release(blocks)

        for name, priority in wants:
            env.process(kernel(name, priority))  # type: ignore[arg-type]
        env.run()
        return names, pool.rounds_held

    wants = [("low", 2), ("high", 0), ("middle", 1)]
    assert order(wants) == order(wants[::-1]) == (["high", "middle", "low"], 3)


def test_kernels_queue_as_simpy_events_in_simpy_queues() -> None:
    seen: list[tuple[int, int]] = []

    class Watched(SmPool):
        def arbitrate(self) -> None:
            assert all(isinstance(one, Blocks) for one in self.put_queue)
            seen.append((self._env.now, len(self.put_queue)))  # type: ignore[arg-type]
            super().arbitrate()

    def watch(engine: Engine) -> None:
        engine.core.gpus[0].pools = [Watched(engine.env, 100, engine.rounds)]

    changed(graph((0, [COMPUTE, COMPUTE]), (0, [COMPUTE])), watch)
    assert seen == [(0, 2), (10_000_000, 2), (20_000_000, 1)]
    for kind in (SmPool, CopyEngine, Hbm, LinkPort, Stream, Network, NetworkPort):
        for name in ("_do_put", "_do_get"):
            assert issubclass(kind, BaseResource) and getattr(kind, name) is not getattr(BaseResource, name)


def test_a_collective_with_a_lead_asks_for_its_sms_after_it() -> None:
    late = replace(REDUCE, lead_s=2e-6)
    g = graph((0, [(late, 0)]), (1, [(late, 0)]))
    assert [row[2:] for row in spans(g, run(g))] == [(2.0, 12.0), (2.0, 12.0)]
