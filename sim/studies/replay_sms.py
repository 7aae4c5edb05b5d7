"""The SMs of a GPU in a replay: which blocks find room, and how long the others make a kernel last."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from simpy.core import Environment
from simpy.events import Event, Timeout

Group = tuple[int, int]  # since when (ns) how many SMs


@dataclass(frozen=True, slots=True)
class _Holder:
    """SMs that one row holds: ``sms`` until its last round of blocks begins, then ``last_sms`` to its end."""

    sms: int
    last_sms: int
    tail_ns: int
    end_ns: int

    def at(self, now_ns: int) -> int:
        """SMs held at ``now_ns``."""
        return self.sms if now_ns < self.tail_ns else self.last_sms if now_ns < self.end_ns else 0


def done_by(now_ns: int, groups: Sequence[Group], round_ns: int) -> int:
    """Tiles that are done at ``now_ns`` on ``groups`` of SMs, one after another on each."""
    return sum(sms * max(0, (now_ns - since_ns) // round_ns) for since_ns, sms in groups)


def finish_ns(groups: Sequence[Group], tiles: int, round_ns: int) -> int:
    """When the last of ``tiles`` is done, each of ``round_ns``, on SMs that come one group after another.

    >>> finish_ns([(0, 100)], 132, 10), finish_ns([(0, 100), (4, 32)], 132, 10)
    (20, 14)
    """

    def after(since_ns: int) -> int:
        rounds = range(1, tiles + 1)
        place = bisect_left(rounds, tiles, key=lambda k: done_by(since_ns + k * round_ns, groups, round_ns))
        return since_ns + round_ns * rounds[place]

    return min(after(since_ns) for since_ns, _ in groups)


class SmPool:
    """The SMs of one GPU: who holds how many until when; collectives wait here for theirs."""

    def __init__(self, env: Environment, sms: int) -> None:
        self.env, self.sms = env, sms
        self.holders: dict[int, _Holder] = {}

    def free(self) -> int:
        """SMs that nobody holds now."""
        now_ns = self.env.now
        return self.sms - sum(holder.at(now_ns) for holder in self.holders.values())

    def room_for(self, sms: int) -> Generator[Event, None, None]:
        """Wait until ``sms`` SMs are free, or nobody holds any."""
        env = self.env
        while sms > self.free():
            changes = [moment for holder in self.holders.values() for moment in (holder.tail_ns, holder.end_ns)]
            if (moment := min((moment for moment in changes if moment > env.now), default=None)) is None:
                return
            yield Timeout(env, moment - env.now)

    def groups(self, blocks: int) -> tuple[Group, ...]:
        """SMs of ``blocks`` that start now: what is free (no groups where nothing is), then what others leave."""
        now_ns, free = int(self.env.now), self.free()
        if free <= 0:
            return ()
        found = [(now_ns, min(blocks, free))]
        missing = blocks - found[0][1]
        leaving = sorted((holder.end_ns, holder.at(now_ns)) for holder in self.holders.values()) if missing else ()
        for end_ns, sms in leaving:
            if taken := min(missing, sms):
                found.append((end_ns, taken))
                missing -= taken
        return tuple(found)

    def rounds(self, groups: Sequence[Group], tiles: int, dur_ns: int) -> float:
        """Rounds of ``tiles`` in which work of ``dur_ns`` on ``groups`` goes, to a nanosecond of a round."""
        now_ns, sms = groups[0]
        most = max(1, -(-tiles // sms))
        if len(groups) == 1 or dur_ns < 2 * most:
            return most
        times_ns = range(dur_ns // most, dur_ns + 1)
        at = bisect_left(times_ns, dur_ns, key=lambda round_ns: finish_ns(groups, tiles, round_ns) - now_ns)
        return dur_ns / times_ns[min(at, len(times_ns) - 1)]

    def take(self, row: int, sms: int, tiles: int, dur_ns: int) -> None:
        """Hold ``sms`` from now on, for ``dur_ns``, in equal rounds of ``tiles``.

        Blocks that come later hold none here: a collective that waits gets what another leaves before they do.
        """
        rounds = max(1, -(-tiles // sms))
        begin_ns = int(self.env.now)
        self.holders[row] = _Holder(
            sms=sms,
            last_sms=tiles - sms * (rounds - 1),
            tail_ns=begin_ns + dur_ns * (rounds - 1) // rounds,
            end_ns=begin_ns + dur_ns,
        )
