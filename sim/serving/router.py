"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

from sim.serving.replica import Replica
from sim.serving.requests import Request

Policy = Literal["round_robin", "least_loaded", "prefix_aware"]


class Router(Protocol):
    """Chooses among living replicas (never none)."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """The replica that gets ``request``."""


@dataclass(slots=True)
class RoundRobin:
    """One after the other."""

    turn: int = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:  # noqa: ARG002 - Router's signature
        """The next in turn."""
        self.turn += 1
        return replicas[(self.turn - 1) % len(replicas)]


def fewest_tokens(replica: Replica) -> tuple[int, int]:
    """By the tokens of requests not yet done."""
    return (replica.outstanding_tokens, replica.number)


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The one with the fewest tokens of requests not yet done."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:  # noqa: ARG002 - Router's signature
        """The least loaded."""
        return min(replicas, key=fewest_tokens)


@dataclass(frozen=True, slots=True)
class PrefixAware:
    """The one that has most of the prompt in memory, unless it holds ``imbalance`` times the tokens of the least loaded
    one and more than the request itself; without a hit the least loaded.
    """

    imbalance: float = 2.0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """The best match that is not overloaded."""
        least = min(replicas, key=fewest_tokens)
        limit = self.imbalance * least.outstanding_tokens + request.input_tokens + request.output_tokens

        def rank(replica: Replica) -> tuple[int, int, int]:
            return (-replica.scheduler.memory.matched(request.prefix), *fewest_tokens(replica))

        best = min(replicas, key=rank)
        return best if best.outstanding_tokens <= limit else least


def router_of(policy: Policy) -> Router:
    """A fresh router by name."""
    match policy:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "prefix_aware":
            return PrefixAware()
    assert_never(policy)
