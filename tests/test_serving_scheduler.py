"""Scheduler stories, step by step to their literal endings."""

from __future__ import annotations

from sim.serving.inflight import Limits, Sequence
from sim.serving.kv import BlockPool
from sim.serving.requests import Request
from sim.serving.scheduler import Scheduler


def request(number: int, inputs: int, outputs: int, **more: object) -> Sequence:
    made = Request(number=number, arrival_s=float(number), input_tokens=inputs, output_tokens=outputs, **more)  # type: ignore[arg-type]
    return Sequence(request=made, target=inputs)


def scheduler(blocks: int, **limits: object) -> Scheduler:
    return Scheduler(
        limits=Limits(**({"max_num_seqs": 4, "max_num_batched_tokens": 10} | limits)),  # type: ignore[arg-type]
        pool=BlockPool(blocks=blocks, block_tokens=4),
    )


def story(scheduler: Scheduler, steps: int) -> list[str]:
    """Each step in words: decoding sequences and their cached tokens, pieces of prompts, who is done."""
    told = []
    for _ in range(steps):
        plan = scheduler.plan()
        pieces = " ".join(f"{s.request.number}:{tokens}" for s, tokens in plan.pieces)
        swapped = f" swapped {plan.swapped_tokens}" if plan.swapped_tokens else ""
        _, done = scheduler.advance(plan)
        batch = plan.batch
        ended = "".join(f" done {s.request.number}" for s in done)
        told.append(f"{batch.decoding} over {batch.cached} + [{pieces}]{swapped}{ended} used {scheduler.pool.used}")
    return told


def test_a_long_prompt_is_cut_to_fit_beside_running_sequences() -> None:
    one = scheduler(100)
    one.add(request(0, 4, 5))
    one.add(request(1, 20, 2))
    assert story(one, 6) == [
        "0 over 0 + [0:4 1:6] used 3",
        "1 over 4 + [1:9] used 6",
        "1 over 5 + [1:5] used 7",
        "2 over 26 + [] done 1 used 2",
        "1 over 7 + [] done 0 used 0",
        "0 over 0 + [] used 0",
    ]


def test_the_last_comer_makes_room_and_is_computed_anew() -> None:
    one = scheduler(4)
    one.add(request(0, 4, 6))
    one.add(request(1, 4, 6))
    assert story(one, 11) == [
        "0 over 0 + [0:4 1:4] used 2",
        "2 over 8 + [] used 4",
        "2 over 10 + [] used 4",
        "2 over 12 + [] used 4",
        "2 over 14 + [] used 4",
        "1 over 8 + [] done 0 used 0",  # 0 needs a third block: 1 gives its two
        "0 over 0 + [1:9] done 1 used 0",  # four of its prompt and five that it had generated
        "0 over 0 + [] used 0",
        "0 over 0 + [] used 0",
        "0 over 0 + [] used 0",
        "0 over 0 + [] used 0",
    ]
    assert one.preempted == 1


def test_a_swapped_sequence_comes_back_with_what_it_had() -> None:
    one = scheduler(4, preemption="swap")
    one.add(request(0, 4, 6))
    one.add(request(1, 4, 6))
    assert story(one, 7)[5:] == [
        "1 over 8 + [] swapped 8 done 0 used 0",
        "1 over 8 + [] swapped 8 done 1 used 0",
    ]


def test_lower_priority_waits_and_is_preempted_first() -> None:
    one = scheduler(4, max_num_seqs=2)
    one.add(request(0, 4, 6))
    one.add(request(1, 4, 6, priority=1))
    assert story(one, 6)[5] == "1 over 8 + [] done 1 used 0"


def test_an_equal_beginning_is_computed_once() -> None:
    one = scheduler(20, max_num_batched_tokens=20)
    one.add(request(0, 10, 1, prefix=(7, 8), block_tokens=4))
    first = story(one, 1)
    one.add(request(1, 11, 1, prefix=(7, 8), block_tokens=4))
    one.add(request(2, 8, 1, prefix=(7, 9), block_tokens=4))
    assert first + story(one, 1) == [
        "0 over 0 + [0:10] done 0 used 0",
        "0 over 0 + [1:3 2:4] done 1 done 2 used 0",
    ]
    assert one.pool.matched((7, 8)) == 2


def test_an_equal_beginning_is_shared_in_the_very_step_that_computes_it() -> None:
    one = scheduler(20, max_num_batched_tokens=20)
    one.add(request(0, 10, 2, prefix=(7, 8), block_tokens=4))
    one.add(request(1, 11, 2, prefix=(7, 8), block_tokens=4))
    assert story(one, 2) == [
        "0 over 0 + [0:10 1:3] used 4",  # two blocks together, one each for the rest
        "2 over 21 + [] done 0 done 1 used 0",
    ]


def test_forgotten_prompts_make_room() -> None:
    one = scheduler(3, max_num_batched_tokens=20)
    one.add(request(0, 8, 1, prefix=(7, 8), block_tokens=4))
    story(one, 1)
    assert (one.pool.free, one.pool.available) == (1, 3)
    one.add(request(1, 12, 1))
    assert story(one, 1) == ["0 over 0 + [1:12] done 1 used 0"]
    assert one.pool.matched((7, 8)) == 0
    assert one.pool.available == 3


def test_memory_is_taken_in_the_order_in_which_it_was_let_go_a_prompts_end_first() -> None:
    """Two blocks of a prompt, then four that nobody can use again: the prompt goes first, from its end."""
    one = scheduler(6, max_num_batched_tokens=20)
    one.add(request(0, 8, 1, prefix=(7, 8), block_tokens=4))
    story(one, 1)
    one.add(request(1, 16, 1))
    story(one, 1)
    found = []
    while one.pool.take(1):
        found.append((one.pool.matched((7, 8)), one.pool.available))
    assert found == [(1, 5), (0, 4), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_many_equal_steps_end_as_the_same_steps_one_by_one() -> None:
    quick, slow = scheduler(100), scheduler(100)
    for one in (quick, slow):
        one.add(request(0, 3, 40))
        one.add(request(1, 5, 30))
        one.advance(one.plan())
    plan = quick.plan()
    steps = quick.steady_steps()
    assert steps == 29
    quick.advance(plan, steps)
    for _ in range(steps):
        slow.advance(slow.plan())
    assert (quick.step, quick.cached_tokens, quick.pool.free) == (slow.step, slow.cached_tokens, slow.pool.free)
