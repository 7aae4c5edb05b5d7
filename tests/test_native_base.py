"""The classes under a compiled engine do what SimPy's do, in the same order: here as Python, side by side."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import simpy

from sim.engine import native_base, simpy_base

NATIVE = {name: getattr(native_base, f"Native{name}") for name in simpy_base.__all__}
SIMPY = {name: getattr(simpy_base, name) for name in simpy_base.__all__}
Log = list[tuple[Any, ...]]


def _counter(base: dict[str, Any], env: Any, capacity: int) -> Any:
    """A resource that lends ``capacity`` of itself, in the order of the requests."""

    class Put(base["Put"]):  # type: ignore[misc]
        def __init__(self, resource: Any, amount: int) -> None:
            self.amount = amount
            super().__init__(resource)

    class Get(base["Get"]):  # type: ignore[misc]
        def __init__(self, resource: Any, amount: int) -> None:
            self.amount = amount
            super().__init__(resource)

    class Counter(base["BaseResource"]):  # type: ignore[misc]
        level = 0

        def put_some(self, amount: int) -> Any:
            return Put(self, amount)

        def get_some(self, amount: int) -> Any:
            return Get(self, amount)

        def _do_put(self, event: Any) -> bool:
            if self.level + event.amount > self.capacity:
                return False
            self.level += event.amount
            event.succeed(self.level)
            return True

        def _do_get(self, event: Any) -> bool:
            if self.level < event.amount:
                return False
            self.level -= event.amount
            event.succeed(self.level)
            return True

    return Counter(env, capacity)


def _log(base: dict[str, Any]) -> Log:
    env = base["Environment"]()
    counter, log = _counter(base, env, 5), []
    gate = base["Event"](env)

    def giver(name: str, amounts: list[int]) -> Generator[Any, Any, str]:
        for amount in amounts:
            level = yield counter.put_some(amount)
            log.append((env.now, name, "put", amount, level))
            yield env.timeout(amount)
        return name

    def taker(name: str, amounts: list[int]) -> Generator[Any, Any, str]:
        yield gate
        for amount in amounts:
            asked = counter.get_some(amount)
            both = yield asked & env.timeout(1)
            log.append(
                (
                    env._now,
                    name,
                    "got",
                    amount,
                    asked.value,
                    len(both.todict()),
                    asked.triggered,
                    asked.processed,
                    asked.ok,
                )
            )
        return name

    def opener(others: list[Any]) -> Generator[Any, Any, None]:
        first = yield env.any_of(others) | env.timeout(3)
        log.append((env._now, "first", len(first.todict())))
        gate.succeed("open")
        found = yield env.all_of(others)
        log.append((env._now, "all", sorted(found.values()), env.active_process is not None))

    givers = [env.process(giver("a", [2, 3, 1])), env.process(giver("b", [4, 1]))]
    takers = [env.process(taker("c", [1, 5, 2])), env.process(taker("d", [3]))]
    env.process(opener(givers + takers))
    log.append((env.peek(),))
    env.run(until=4)
    log.append((env._now, counter.level, len(counter.put_queue), len(counter.get_queue), env.peek()))
    env.run()
    return [*log, (env._now, counter.level, gate.value, counter.capacity, env.peek())]


def test_a_resource_with_processes_runs_as_on_simpys_own_classes() -> None:
    log = _log(NATIVE)
    assert log == _log(SIMPY)
    assert log[-1][:3] == (8, 0, "open")


@pytest.mark.parametrize("base", [NATIVE, SIMPY], ids=["native", "simpy"])
def test_an_event_has_one_value(base: dict[str, Any]) -> None:
    event = base["Event"](base["Environment"]())
    with pytest.raises(AttributeError, match="not yet available"):
        _ = event.value
    assert event.succeed(3) is event and event.triggered and not event.processed
    with pytest.raises(RuntimeError, match="already been triggered"):
        event.succeed()


@pytest.mark.parametrize("base", [NATIVE, SIMPY], ids=["native", "simpy"])
def test_a_failed_process_ends_the_run(base: dict[str, Any]) -> None:
    env = base["Environment"]()

    def process() -> Generator[Any, Any, None]:
        yield env.timeout(2)
        raise ValueError("broken")

    env.process(process())
    with pytest.raises(ValueError, match="broken"):
        env.run()
    assert env._now == 2
    assert isinstance(env.event(), simpy.Event)
