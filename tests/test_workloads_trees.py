"""Layers of a few lines with axes of their own: products, bytes and collectives of one rank, counted by hand.

1,024 tokens (2 x 512) of a width of 1,024, in 16 bit: 2.097 MB; of W, 2,048 wide, 4.194 MB.
"""

from __future__ import annotations

from typing import Any

import pytest

from workloads import Layout, Options, WorkloadError, build_program
from workloads.model_file import parse_model
from workloads.work import CollectiveWork, GemmWork

HEAD = """id = "tree"
source = "made up"
d_model = 1024
layers = 1
q_heads = 16
kv_heads = 4
head_dim = 64
d_ff = 4096
vocab = 1000
[axes]
A = 3
D = 32
G = 8
Q = 512
R = 128
W = 2048
"""


def product(name: str, pattern: str, parallel: str = "", source: str = "") -> str:
    along = f', parallel = "{parallel}"' if parallel else ""
    read = f'source = "{source}"\n' if source else ""
    ops = f'ops = [{{ label = "{name}", pattern = "{pattern}"{along} }}]\n'
    return f'[[block]]\nnode = "gemm"\nname = "{name}"\n{read}{ops}'


def pointwise(name: str, op: str, **more: str) -> str:
    fields = "".join(f'{key} = "{value}"\n' for key, value in more.items())
    return f'[[block]]\nnode = "pointwise"\nname = "{name}"\nop = "{op}"\n{fields}'


NORM = pointwise("norm", "add_rmsnorm")
UP, DOWN = product("up", "bsm,mW->bsW", "W"), product("down", "bsW,mW->bsm", "W")
GELU = pointwise("act", "gelu", axis="W")


def layer(body: str, *, phase: Any = "prefill", **layout: Any) -> list[str]:
    """Products as count x rows x columns x depth with their MB, collectives with theirs."""
    model = parse_model(HEAD + NORM + body, where="tree.toml")
    options = Options(lm_head=False)
    program = build_program(model, Layout(**{"tp": 2} | layout), phase=phase, batch=2, seq_len=512, options=options)
    said = []
    for one in program.ranks[0].phases[0].segments[0].kernels:
        match one.work:
            case GemmWork() as work:
                assert one.flops == 2 * work.count * work.m * work.n * work.k
                said.append(f"{one.name} {work.count}x{work.m}x{work.n}x{work.k} {one.bytes_moved / 1e6:.3f}")
            case CollectiveWork() as work:
                said.append(f"{one.name} {work.buffer_bytes / 1e6:.3f}")
            case _:
                pass
    return said


@pytest.mark.parametrize(
    ("body", "right"),
    [
        (UP + DOWN, ["up 1x1024x1024x1024 6.291", "down 1x1024x1024x1024 6.291", "all_reduce_down 2.097"]),
        # a rank of 128 between, whole and split
        (product("a", "bsm,mR->bsR") + product("b", "bsR,RW->bsW", "W") + DOWN,
         ["a 1x1024x128x1024 2.621", "b 1x1024x1024x128 2.621", "down 1x1024x1024x1024 6.291",
          "all_reduce_down 2.097"]),
        (product("a", "bsm,mR->bsR", "R") + product("b", "bsR,RW->bsW", "R") + GELU + product("down", "bsW,mW->bsm"),
         ["a 1x1024x64x1024 2.359", "b 1x1024x2048x64 4.588", "all_reduce_b 4.194", "down 1x1024x1024x2048 10.486"]),
        # a matrix for each of 8 groups, 4 of them a rank's
        (product("in", "bsm,mGD->bsGD", "G") + product("mix", "bsGD,GDR->bsGR", "G")
         + product("out", "bsGR,mGR->bsm", "G"),
         ["in 1x1024x128x1024 2.621", "mix 4x1024x128x32 1.343", "out 1x1024x1024x512 4.194", "all_reduce_out 2.097"]),
        # two activations: scores of 8 heads of 2 sequences; of whole tokens; with their columns split
        (product("Q", "bsm,mHh->bsHh", "H") + product("S", "bHsh,bHzh->bHsz", "H"),
         ["Q 1x1024x512x1024 4.194", "S 16x512x512x64 10.486", "all_gather_S 16.777"]),
        (product("S", "bsm,bzm->bsz"), ["S 2x512x512x1024 5.243"]),
        (product("S", "bsm,bzm->bsz", "z"), ["S 2x512x256x1024 3.670", "all_gather_S 1.049"]),
        # neighbours that split other axes
        (UP + product("down", "bsW,mW->bsm", "m"),
         ["up 1x1024x1024x1024 6.291", "all_gather_up 4.194", "down 1x1024x512x2048 7.340", "all_gather_down 2.097"]),
        (product("up", "bsm,mW->bsW", "m") + GELU + DOWN,
         ["up 1x1024x2048x512 7.340", "all_reduce_up 4.194", "down 1x1024x1024x1024 6.291", "all_reduce_down 2.097"]),
        (product("up", "bsm,mW->bsW", "b") + product("down", "bsW,mW->bsm", "b"),
         ["up 1x512x2048x1024 7.340", "down 1x512x1024x2048 7.340", "all_gather_down 2.097"]),
        (product("up", "bsm,mW->bsW", "s") + DOWN,
         ["up 1x512x2048x1024 7.340", "all_gather_up 4.194", "down 1x1024x1024x1024 6.291", "all_reduce_down 2.097"]),
        (product("Q", "bsm,mHh->bsHh", "H") + product("O", "bsHh,mHh->bsm", "h"),
         ["Q 1x1024x512x1024 4.194", "all_gather_Q 2.097", "O 1x1024x1024x512 4.194", "all_reduce_O 2.097"]),
        # an axis that only the weight has, summed over: as deep as three inputs beside one another
        (product("up", "bsm,mAW->bsW", "W") + DOWN,
         ["up 1x1024x1024x3072 14.680", "down 1x1024x1024x1024 6.291", "all_reduce_down 2.097"]),
        # 3 does not split in 2: the fuller rank's 2
        (product("a", "bsm,mA->bsA", "A") + product("b", "bsA,mA->bsm", "A"),
         ["a 1x1024x2x1024 2.105", "b 1x1024x1024x2 2.105", "all_reduce_b 2.097"]),
        # two branches of one input: their sums are reduced once
        (UP + DOWN + product("c", "bsm,mQ->bsQ", "Q", "norm") + product("d", "bsQ,mQ->bsm", "Q")
         + pointwise("add", "add", axis="m", beside="down"),
         ["up 1x1024x1024x1024 6.291", "down 1x1024x1024x1024 6.291", "c 1x1024x256x1024 3.146",
          "d 1x1024x1024x256 3.146", "all_reduce_add 2.097"]),
    ],
)  # fmt: skip
def test_a_layer_of_a_few_lines_is_what_it_says(body: str, right: list[str]) -> None:
    assert layer(body) == right


def test_other_layouts_and_phases() -> None:
    both = ["up 1x1024x1024x1024 6.291", "down 1x1024x1024x1024 6.291"]
    assert layer(UP + DOWN, sequence_parallel=True) == ["all_gather_norm 2.097", *both, "reduce_scatter_norm 2.097"]
    assert layer(product("V", "bKrsz,bKzh->bKrsh", "K"), phase="decode") == ["V 4x4x64x512 0.281", "all_gather_V 0.004"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (product("t", "bsm,mR,RW->bsW", "W") + DOWN,
         "'bsm,mR,RW->bsW': a product has two operands, this one 3: write one node after another"),
        (product("t", "bsm->bsm"), "'bsm->bsm': a product has two operands, this one 1"),
        (UP + product("down", "bsQ,mQ->bsm", "Q"), "down: reads 'bsQ', and up yields 'bsW': mend one of them"),
        (product("up", "bsm,mW->bsW", "Q"), "parallel axis 'Q' is not in the pattern (bsmW)"),
        (product("up", "bsm,mZ->bsZ", "Z"), "up: size of axis 'Z' is missing: give it under [axes]"),
        (UP + DOWN + pointwise("add", "add", axis="m", beside="dwon"), "add: beside = 'dwon': no node before it has"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(body: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_model(HEAD + NORM + body, where="tree.toml")
    assert message in str(error.value)


def test_products_that_are_not_as_many_are_no_one_kernel() -> None:
    both = '[[block]]\nnode = "gemm"\nname = "mix"\nops = [{ label = "one", pattern = "bsGD,GDR->bsGR" }, '
    both += '{ label = "other", pattern = "bsGD,GDW->bsW" }]\n'
    with pytest.raises(WorkloadError, match="mix: one and other are not as many products: give each a node"):
        layer(product("in", "bsm,mGD->bsGD") + both, tp=1)
