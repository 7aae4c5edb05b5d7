"""What goes to workers together: shared work is done once, and workers end at once."""

from __future__ import annotations

import itertools

import pytest

from sim.explore.batches import MAX_BATCH, Family, Item, batches, families


def grid(**axes: list[object]) -> list[Item]:
    points = itertools.product(*axes.values())
    return [(str(point), {"model": "llama3-8b", **dict(zip(axes, point, strict=True))}) for point in points]


def sized(*works: int) -> list[Family]:
    return [[[(f"{number}.{i}", {}) for i in range(rows)]] for number, rows in enumerate(works)]


def test_what_shares_most_stands_together_whatever_the_order_of_the_grid() -> None:
    caps, ctas, lengths = [500, 600], [4, 8], [64, 128]
    for order in itertools.permutations(["power_cap_w", "comm_ctas", "seq_len"]):
        values = {"power_cap_w": caps, "comm_ctas": ctas, "seq_len": lengths}
        found = families(grid(**{name: values[name] for name in order}))
        assert [[[f["seq_len"] for _, f in work] for work in family] for family in found] == [
            [[length] * 2] * 2 for length in lengths
        ]
        assert all(len({f["comm_ctas"] for _, f in work}) == 1 for family in found for work in family)


def test_a_value_left_out_is_a_work_of_its_own() -> None:
    found = families([("a", {"comm_ctas": 4}), ("b", {}), ("c", {"comm_ctas": 4, "uncapped": True})])
    assert [[[name for name, _ in work] for work in family] for family in found] == [[["a", "c"], ["b"]]]


@pytest.mark.parametrize("jobs", [1, 2, 7, 64])
def test_every_scenario_goes_out_once_and_works_stay_whole(jobs: int) -> None:
    todo = families(grid(seq_len=list(range(64, 80)), comm_ctas=[4, 8, 12, 16, 24], power_cap_w=list(range(500, 510))))
    out = list(batches(todo, jobs))
    names = [name for batch in out for name, _ in batch]
    assert names == [name for family in todo for work in family for name, _ in work]
    batch_of = {name: number for number, batch in enumerate(out) for name, _ in batch}
    assert all(len({batch_of[name] for name, _ in work}) == 1 for family in todo for work in family)
    assert max(map(len, out)) <= MAX_BATCH and len(out[-1]) == 10


def test_families_that_fit_a_batch_are_not_cut() -> None:
    out = list(batches(families(grid(seq_len=list(range(99)), comm_ctas=[4, 8], power_cap_w=list(range(25)))), 2))
    whole = [batch for batch in out if len(batch) == 50]
    assert len(whole) > 60 and all(len({f["seq_len"] for _, f in batch}) == 1 for batch in whole)


def test_one_long_work_is_shared_out() -> None:
    assert [len(batch) for batch in batches(sized(160), jobs=2)] == [10] * 16
    assert [len(batch) for batch in batches(sized(4), jobs=2)] == [1] * 4
    assert [len(batch) for batch in batches(sized(4, 4), jobs=2)] == [4, 4]
    assert [len(batch) for batch in batches(sized(250, 1), jobs=2)] == [100, 100, 50, 1]


def test_at_last_scenarios_go_one_by_one() -> None:
    # A scenario that ends its worker takes none with it.
    assert [len(batch) for batch in batches(sized(2, 2), jobs=1, most=1)] == [1] * 4
