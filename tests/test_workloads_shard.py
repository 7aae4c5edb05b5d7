"""Collectives that follow from the annotations of a layer's nodes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from sim import simulate
from workloads import Layout, Options, WorkloadError, build_program, load_model
from workloads.kernel_names import Elementwise
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange
from workloads.model_file import parse_model
from workloads.ops import Node, Pointwise, attention, fuse, op, qkv_gemm
from workloads.program import Kernel
from workloads.work import CollectiveWork, GemmWork

PRODUCTS = {
    "up": "bsm,mf->bsf",
    "down": "bsf,mf->bsm",
    "qkv": "bsm,mHh->bsHh",
    "o": "bsHh,mHh->bsm",
    "scores": "bKrsh,bKzh->bKrsz",
}


def tree(text: str) -> tuple[Node, ...]:
    """Nodes from words: ``up:f`` is the product up split along f, ``+norm``, ``+gelu`` and ``+rope`` are pointwise,
    ``down:f<norm`` reads norm's output."""
    nodes: list[Node] = []
    kinds = {"norm": Elementwise.ADD_RMSNORM, "gelu": Elementwise.GELU, "rope": Elementwise.ROPE}
    for word in text.split():
        if word.startswith("+"):
            nodes.append(Pointwise(name=word[1:], op=kinds[word[1:]]))
            continue
        (label, _, axis), (_, _, source) = word.split("<")[0].partition(":"), word.partition("<")
        made = fuse(f"{label}_gemm", op(PRODUCTS[label], parallel=axis or None, label=label))
        nodes.append(made if not source else type(made)(name=made.name, ops=made.ops, source=source))
    return tuple(nodes)


def said(nodes: tuple[Node, ...]) -> str:
    """Collectives among the other nodes' names."""
    return " ".join(
        f"[{node.op.value} {'+'.join(node.axes)}]" if isinstance(node, Exchange) else node.name.removesuffix("_gemm")
        for node in shard(nodes)
    )


@pytest.mark.parametrize(
    ("layer", "right"),
    [
        ("up:f +gelu down:f", "up gelu down [all_reduce bsm]"),
        ("up +gelu down", "up gelu down"),
        ("up:f +gelu down", "up gelu [all_gather bsf] down"),
        ("up +gelu down:f", "up gelu down [all_reduce bsm]"),  # a slice of what is whole costs nothing
        ("up:s +gelu down:s", "up gelu down [all_gather bsm]"),
        ("up:s +gelu down:f", "up gelu [all_gather bsf] down [all_reduce bsm]"),
        ("up:f +gelu down:m", "up gelu [all_gather bsf] down [all_gather bsm]"),
        ("up:m +gelu down:m", "up [all_reduce bsf] gelu down [all_gather bsm]"),
        ("qkv:H +rope o:H +norm up", "qkv rope o [all_reduce bsm] norm up"),
        ("qkv:H +rope o +norm", "qkv rope [all_gather bsHh] o norm"),
        ("+norm qkv:H o:H up:f<norm down:f", "norm qkv o up down [all_reduce bsm]"),  # a parallel block: one sum
        ("+norm up:f down:f +norm up:f down:f", "norm up down [all_reduce bsm] norm up down [all_reduce bsm]"),
    ],
)
def test_collectives_follow_from_the_annotations(layer: str, right: str) -> None:
    assert said(tree(layer)) == right


def test_pointwise_nodes_work_on_the_slices_that_they_find() -> None:
    def splits(layer: str) -> list[str | None]:
        return [node.parallel for node in shard(tree(layer)) if isinstance(node, Pointwise)]

    assert splits("+norm up:f +gelu down:f") == [None, "f"]
    assert splits("up:s +gelu down:s +norm") == ["s", None]
    assert splits("qkv:H +rope o:H") == ["H"]
    assert splits("qkv +rope o") == [None]


def test_attention_without_an_axis_gathers_heads_that_are_split() -> None:
    whole = attention("scale")
    whole = type(whole)(name="attention", scores=op("bKrsh,bKzh->bKrsz", label="s"),
                        values=op("bKrsz,bKzh->bKrsh", label="v"))  # fmt: skip
    assert said((qkv_gemm(), whole)) == "qkv [all_gather bsHh+bsKh+bsKh] attention"
    assert said((qkv_gemm(), attention("scale"), *tree("o:H"))) == "qkv attention o [all_reduce bsm]"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            lambda: (fuse("gate_up", op("bsm,mf->bsf", parallel="f", label="gate"), op("bsm,mf->bsf", label="up")),),
            "gate_up: gate is split along 'f' and up along nothing, both yield 'bsf': give both the same parallel",
        ),
        (
            lambda: (fuse("pair", op("bsm,mf->bsf", parallel="m", label="one"), op("bsm,vm->bsv", label="two")),),
            "pair: two and one share one kernel, and only one of them leaves partial sums: give both the same parallel",
        ),
        (
            lambda: (
                type(attention("scale"))(
                    name="attention",
                    scores=op("bKrsh,bKzh->bKrsz", parallel="h", label="scores"),
                    values=op("bKrsz,bKzh->bKrsh", parallel="h", label="values"),
                ),
            ),
            "attention: parallel = 'h' of scores: the softmax needs whole rows of scores: split heads ('K' or 'H'), "
            "or leave it out",
        ),
        (
            lambda: (
                type(attention("scale"))(
                    name="attention",
                    scores=op("bKrsh,bKzh->bKrsz", parallel="K", label="scores"),
                    values=op("bKrsz,bKzh->bKrsh", label="values"),
                ),
            ),
            "attention: scores are split along 'K' and values along nothing: give both the same parallel",
        ),
        (lambda: tree("+norm up:f<rope"), "up_gemm: source = 'rope': no node before it has that name"),
    ],
)
def test_annotations_that_do_not_fit_are_refused_by_name(nodes: object, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        shard(nodes())  # type: ignore[operator]
    assert str(error.value) == message


# -- three models of docs/howto.md, written with one line changed -------------------------------------------------


def howto() -> str:
    """The model of its own nodes that the page shows."""
    page = (Path(__file__).parent.parent / "docs" / "howto.md").read_text(encoding="utf-8")
    return next(part for part in re.findall(r"```toml\n(.*?)```", page, re.S) if "two-matrix-8b" in part)


def kernels(text: str, tmp_path: Path, tp: int) -> dict[str, Kernel]:
    path = tmp_path / "model.toml"
    path.write_text(text)
    program = build_program(load_model(str(path)), Layout(tp=tp), phase="prefill", batch=1, seq_len=2048,
                            options=Options(layers=1, lm_head=False))  # fmt: skip
    return {kernel.name: kernel for kernel in program.ranks[0].phases[0].segments[0].kernels}


def test_a_product_of_two_activations_is_one_for_each_head(tmp_path: Path) -> None:
    product = '{ label = "PV", pattern = "bKrsz,bKzh->bKrsh", parallel = "K" }'
    block = f'[[block]]\nnode = "gemm"\nname = "values"\nops = [{product}]\n'
    head = howto().split("[[block]]")[0]
    found = kernels(head + block, tmp_path, 1)["values"]
    assert isinstance(found.work, GemmWork)
    assert (found.work.count, found.work.m, found.work.n, found.work.k) == (32, 2048, 128, 2048)
    assert found.bytes_moved == 2 * 32 * (2048 * 2048 + 2 * 2048 * 128) == 301_989_888
    assert found.flops == 2 * 32 * 2048 * 2048 * 128
    split = kernels(head + block, tmp_path, 4)["values"]
    assert split.work == GemmWork(m=2048, n=128, k=2048, count=8)
    run = simulate(model=str(tmp_path / "model.toml"), batch=1, seq_len=2048, layers=1, lm_head=False)
    assert run.latency_s > 90e-6
    # No weight of its own: what is left are the embeddings and the last norm.
    from workloads.params import params

    assert params(parse_model(head + block, where="m.toml")) == 2 * 50304 * 4096 + 4096


def test_slices_of_the_tokens_are_gathered_before_the_next_layer(tmp_path: Path) -> None:
    up, down = 'pattern = "bsm,mf->bsf", parallel = "f"', 'pattern = "bsf,mf->bsm", parallel = "f"'
    text = howto().replace(up, up.replace('"f"', '"s"')).replace(down, down.replace('"f"', '"s"'))
    found = kernels(text, tmp_path, 2)
    last = list(found)[-1]
    work = found[last].work
    assert isinstance(work, CollectiveWork)
    assert (last, work.op.value, work.buffer_bytes) == ("all_gather_down", "all_gather", 2 * 2048 * 4096)
    shapes = [(w.m, w.n, w.k) for name in ("up_gemm", "down_gemm") if isinstance(w := found[name].work, GemmWork)]
    assert shapes == [(1024, 16384, 4096), (1024, 4096, 16384)]  # half the rows, whole weights
    assert found["gelu"].bytes_moved == 2 * 1024 * 16384 * 2


def test_a_product_that_wants_the_whole_width_gathers_it_first(tmp_path: Path) -> None:
    down = 'pattern = "bsf,mf->bsm", parallel = "f"'
    found = kernels(howto().replace(down, down.split(",  parallel")[0].replace(', parallel = "f"', "")), tmp_path, 2)
    names = list(found)
    assert names[-4:] == ["up_gemm", "gelu", "all_gather_up", "down_gemm"]
    work = found["all_gather_up"].work
    assert isinstance(work, CollectiveWork) and work.buffer_bytes == 2 * 2048 * 16384
    down_work = found["down_gemm"].work
    assert isinstance(down_work, GemmWork) and (down_work.n, down_work.k) == (4096, 16384)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_work_of_all_ranks_is_that_of_one_whatever_is_split(tmp_path: Path, tp: int) -> None:
    whole = kernels(howto(), tmp_path, 1)
    split = kernels(howto(), tmp_path, tp)
    for name in ("qkv_gemm", "up_gemm", "down_gemm", "o_gemm", "attention", "rope", "gelu"):
        assert math.isclose(tp * split[name].flops, whole[name].flops)


def test_an_annotation_that_does_not_fit_is_refused_when_the_file_is_read() -> None:
    value = 'label = "V", pattern = "bsm,mKh->bsKh"'
    bad = howto().replace(f'{value}, parallel = "K"', value)
    with pytest.raises(
        WorkloadError, match=r"m.toml: qkv_gemm: V is split along nothing and K along 'K', both yield 'bsKh'"
    ):
        parse_model(bad, where="m.toml")


# Five more models of that page with one line that is badly annotated: collectives counted by hand, in MB of 16 bit.
# 2,048 tokens of 4,096 are 16.78 MB, of 16,384 67.11 MB; queries, keys and values together 50.33 MB.
@pytest.mark.parametrize(
    ("line", "instead", "right"),
    [
        ('"bsHh,mHh->bsm", parallel = "H"', '"bsHh,mHh->bsm", parallel = "m"',
         "all_gather_attention 16.78, all_gather_o 16.78, all_reduce_down 16.78"),
        ('"bsm,mf->bsf", parallel = "f"', '"bsm,mf->bsf", parallel = "m"',
         "all_reduce_attn 16.78, all_reduce_up 67.11, all_reduce_down 16.78"),
        ('"bsf,mf->bsm", parallel = "f"', '"bsf,mf->bsm", parallel = "m"',
         "all_reduce_attn 16.78, all_gather_up 67.11, all_gather_down 16.78"),
        ('values = "bKrsz,bKzh->bKrsh"\nparallel = "K"', 'values = "bKrsz,bKzh->bKrsh"',
         "all_gather_qkv 50.33, all_reduce_attn 16.78, all_reduce_down 16.78"),
        ('"bsHh,mHh->bsm", parallel = "H"', '"bsHh,mHh->bsm"', "all_gather_attention 16.78, all_reduce_down 16.78"),
    ],
)  # fmt: skip
def test_a_badly_annotated_line_moves_what_the_ranks_lack(tmp_path: Path, line: str, instead: str, right: str) -> None:
    text = howto()
    assert line in text
    found = kernels(text.replace(line, instead), tmp_path, 2).values()
    moved = [(one.name, one.work.buffer_bytes) for one in found if isinstance(one.work, CollectiveWork)]
    assert ", ".join(f"{name} {size / 1e6:.2f}" for name, size in moved) == right


def test_a_pointwise_node_over_an_axis_that_is_not_there_is_refused() -> None:
    """Its default width would be priced in silence: a quarter of the elements here."""
    bad = howto().replace('op = "gelu"', 'op = "gelu"\naxis = "m"')
    with pytest.raises(WorkloadError, match=r"m.toml: gelu: reads 'bsm', and up_gemm yields 'bsf'"):
        parse_model(bad, where="m.toml")
