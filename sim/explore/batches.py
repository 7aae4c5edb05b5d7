"""In which order and how many at once scenarios go to workers: those that share most of their work together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sim.scenario.resolved import POLICY

Item = tuple[str, Mapping[str, Any]]
# Scenarios of one work, and works of one family.
Work = list[Item]
Family = list[Work]

# A batch is what a worker takes and what a killed worker loses; its overhead is about 1 ms.
MAX_BATCH = 100
# A batch is at most one so-many-th of a worker's share of what is left: the last ones are small, so that workers end
# at once.
PARTS = 8
# Fields that say which blocks carry communication: kernels of compute beside it are the same.
OF_COMMUNICATION = frozenset({"comm_ctas"})


def families(todo: Sequence[Item]) -> list[Family]:
    """``todo`` by what it shares: a work is all that differs in its power policy alone, a family all works whose
    compute is the same. In order of first appearance.

    >>> grid = [(f"{ctas} {cap}", {"comm_ctas": ctas, "power_cap_w": cap}) for cap in (500, 600) for ctas in (4, 8)]
    >>> [[[name for name, _ in work] for work in family] for family in families(grid)]
    [[['4 500', '4 600'], ['8 500', '8 600']]]
    """
    found: dict[tuple[str, ...], dict[str, Work]] = {}
    for item in todo:
        given = [(name, value) for name, value in sorted(item[1].items()) if name not in POLICY]
        family = tuple(f"{name}={value!r}" for name, value in given if name not in OF_COMMUNICATION)
        work = repr([value for name, value in given if name in OF_COMMUNICATION])
        found.setdefault(family, {}).setdefault(work, []).append(item)
    return [list(works.values()) for works in found.values()]


def batches(todo: Sequence[Family], jobs: int, most: int = MAX_BATCH) -> Iterator[list[Item]]:
    """``todo`` for ``jobs`` workers, in batches of about ``most`` at most, fewer towards the end.

    A batch ends with a work, best with a family. A work is cut where there are fewer works than workers, or it is very
    long.

    >>> sizes = [len(batch) for batch in batches([[[("", {})] * 10] * 5] * 20, jobs=2)]
    >>> sizes[0], sizes[10], sizes[-1], sum(sizes)
    (50, 20, 10, 1000)
    """
    left = sum(len(work) for family in todo for work in family)
    size = batch_size(left, jobs, most)
    part_size = size if sum(map(len, todo)) < jobs else most
    batch: list[Item] = []
    for family in todo:
        for part in (part for work in family for part in _parts(work, part_size)):
            if batch and len(batch) + len(part) > size:
                yield batch
                left, batch = left - len(batch), []
                size = batch_size(left, jobs, most)
            batch += part
        if 2 * len(batch) >= size:
            yield batch
            left, batch = left - len(batch), []
            size = batch_size(left, jobs, most)
    if batch:
        yield batch


def batch_size(left: int, jobs: int, most: int = MAX_BATCH) -> int:
    """Scenarios that a batch should have where so many are ``left``."""
    return max(1, min(most, left // (jobs * PARTS)))


def _parts(work: Work, size: int) -> Iterator[Work]:
    """``work``, or parts of ``size`` of a long one; at last single scenarios, one of which may end its worker."""
    step = size if len(work) > 2 * size or size == 1 else len(work)
    return (work[at : at + step] for at in range(0, len(work), step))
