"""The einsum language: parsing, sizes, FLOPs, matrix shapes, reductions, and errors that quote the pattern."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.einsum import AXES, parse
from workloads.errors import WorkloadError
from workloads.ops import op

# Two sequences of 1024 tokens through Llama-3-8B: 32 query heads in 8 groups of 4, head size 128.
SIZES = {"b": 2, "s": 1024, "z": 1024, "m": 4096, "H": 32, "K": 8, "r": 4, "h": 128, "f": 14336, "v": 128256}


@pytest.mark.parametrize(
    ("pattern", "flops", "gemm"),
    [
        # 2 x 2048 tokens x 4096 x (32 x 128)
        ("bsm,mHh->bsHh", 68_719_476_736, (2048, 4096, 4096)),
        # 2 x 2048 x 4096 x (8 x 128)
        ("bsm,mKh->bsKh", 17_179_869_184, (2048, 1024, 4096)),
        ("bsHh,mHh->bsm", 68_719_476_736, (2048, 4096, 4096)),
        # 2 x 2048 x 4096 x 14336, both ways
        ("bsm,mf->bsf", 240_518_168_576, (2048, 14336, 4096)),
        ("bsf,mf->bsm", 240_518_168_576, (2048, 4096, 14336)),
        # 2 x 2048 x 128256 x 4096
        ("bsm,vm->bsv", 2_151_778_615_296, (2048, 128256, 4096)),
    ],
)
def test_projections_of_llama3_8b_by_hand(pattern: str, flops: int, gemm: tuple[int, int, int]) -> None:
    einsum = parse(pattern)
    assert einsum.flops(SIZES) == flops
    assert einsum.gemm(SIZES) == gemm
    assert 2 * prod(gemm) == flops


def test_attention_of_llama3_8b_by_hand() -> None:
    scores, values = parse("bKrsh,bKzh->bKrsz"), parse("bKrsz,bKzh->bKrsh")
    # 2 x 2 sequences x 32 heads x 1024 x 1024 x 128, twice
    assert scores.flops(SIZES) == values.flops(SIZES) == 17_179_869_184
    assert scores.input_elements(0, SIZES) == 2 * 1024 * 4096
    assert scores.input_elements(1, SIZES) == 2 * 1024 * 1024
    assert scores.output_elements(SIZES) == 2 * 32 * 1024 * 1024


@pytest.mark.parametrize(
    ("heads", "grouped"),
    [
        ("bsm,mHh->bsHh", "bsm,mKrh->bsKrh"),
        ("bHsh,bHzh->bHsz", "bKrsh,bKzh->bKrsz"),
        ("bHsz,bHzh->bHsh", "bKrsz,bKzh->bKrsh"),
        ("bsHh,mHh->bsm", "bsKrh,mKrh->bsm"),
    ],
)
def test_both_published_spellings_of_heads_cost_the_same(heads: str, grouped: str) -> None:
    one, other = parse(heads), parse(grouped)
    assert one.flops(SIZES) == other.flops(SIZES)
    assert one.output_elements(SIZES) == other.output_elements(SIZES)
    if "m" in heads:
        assert one.gemm(SIZES) == other.gemm(SIZES)


def test_spaces_do_not_matter_and_equal_patterns_are_parsed_once() -> None:
    assert parse(" bsm , mf -> bsf ") == parse("bsm,mf->bsf")
    assert parse("bsm,mf->bsf") is parse("bsm,mf->bsf")


def test_what_is_summed_over_decides_the_reduction() -> None:
    down = parse("bsf,mf->bsm")
    assert (down.contracted, down.axes) == ("f", "bsfm")
    assert down.reduction("f") == "all_reduce"
    assert down.reduction("m") is None
    assert down.reduction(None) is None


def test_experts_are_looked_up_not_summed_over() -> None:
    up = parse("bskm,emf->bskf")
    # 2 x 2048 tokens x 8 of 128 experts x 2048 x 768; the weight has all of them
    sizes = {"b": 2, "s": 1024, "m": 2048, "e": 128, "k": 8, "f": 768}
    assert (up.contracted, up.flops(sizes)) == ("m", 2 * 2048 * 8 * 2048 * 768)
    assert up.input_elements(1, sizes) == 128 * 2048 * 768
    assert parse("bsm,em->bse").flops(sizes) == 2 * 2048 * 2048 * 128  # a router scores every expert


def test_without_a_contraction_an_element_is_one_flop() -> None:
    assert parse("bsm->bsm").flops(SIZES) == 2 * 1024 * 4096


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("bsm,mf", "'bsm,mf': an einsum has exactly one '->' between inputs and output"),
        ("bsm->bs->b", "'bsm->bs->b': an einsum has exactly one '->' between inputs and output"),
        ("bsm,->bsm", "'bsm,->bsm': an operand is empty; write its axes, for example 'bsm'"),
        ("bsm,mf->", "'bsm,mf->': an operand is empty; write its axes, for example 'bsm'"),
        (
            "bsm,mx->bsx",
            "'bsm,mx->bsx': unknown axis 'x'; known axes are b s z m H K r h j f e k l v d u q c n p i g t",
        ),
        ("bsm,mm->bsm", "'bsm,mm->bsm': axis 'm' stands twice in 'mm'; traces are not supported"),
        ("bsm,mf->bsfv", "'bsm,mf->bsfv': output axis 'v' is in no input"),
    ],
)
def test_errors_quote_the_pattern_and_the_axis(pattern: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse(pattern)
    assert str(error.value) == message


def test_a_missing_size_is_named_in_words() -> None:
    with pytest.raises(WorkloadError) as error:
        parse("bsm,mf->bsf").flops({"b": 1, "s": 1, "m": 8})
    assert str(error.value) == "'bsm,mf->bsf': size of axis 'f' (feed-forward width) is missing"


def test_an_op_refuses_to_shard_an_axis_that_it_does_not_have() -> None:
    with pytest.raises(WorkloadError) as error:
        op("bsm,mf->bsf", label="up", parallel="H")
    assert str(error.value) == "'bsm,mf->bsf': parallel axis 'H' is not in the pattern (bsmf)"


@given(
    axis=st.sampled_from("bsmf"),
    factor=st.integers(2, 8),
    sizes=st.fixed_dictionaries({axis: st.integers(1, 64) for axis in "bsmf"}),
)
def test_flops_are_linear_in_every_axis(axis: str, factor: int, sizes: dict[str, int]) -> None:
    einsum = parse("bsm,mf->bsf")
    assert einsum.flops(sizes | {axis: factor * sizes[axis]}) == factor * einsum.flops(sizes)
    assert 2 * prod(einsum.gemm(sizes)) == einsum.flops(sizes)


@given(pattern=st.text(alphabet=[*"".join(AXES), ",", "-", ">", " ", "q"], max_size=16))
def test_any_text_is_parsed_or_refused_in_one_line(pattern: str) -> None:
    try:
        parsed = parse(pattern)
    except WorkloadError as error:
        assert "\n" not in str(error) and repr(pattern)[1:-1] in str(error)
    else:
        assert set(parsed.output) <= set("".join(parsed.inputs))
