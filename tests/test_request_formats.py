"""Public files of requests: each format's columns, units of time and blocks; texts are refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import ScenarioError
from sim.serving.request_files import read_traffic

BAILIAN = """\
{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 52, "output_length": 13, "hash_ids": [1, 2]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 64.0, "input_length": 80, "output_length": 7, "hash_ids": [1, 3]}
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3052, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
"""
SPLITWISE = """\
request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,0.5,1,374,44
1,2,0,4.25,1,396,109
"""


@pytest.mark.parametrize(
    ("text", "arrivals", "tokens", "block_tokens"),
    [
        pytest.param(BAILIAN, [0.0, 2.5], [(52, 13), (80, 7)], 16, id="Bailian: seconds, blocks of 16"),
        pytest.param(MOONCAKE, [0.0, 3.052], [(6758, 500), (7322, 490)], 512, id="Mooncake: ms, blocks of 512"),
        pytest.param(SPLITWISE, [0.0, 3.75], [(374, 44), (396, 109)], 512, id="Splitwise: seconds"),
    ],
)
def test_columns_units_and_blocks(
    tmp_path: Path, text: str, arrivals: list[float], tokens: list[tuple[int, int]], block_tokens: int
) -> None:
    path = tmp_path / "requests"
    path.write_text(text)
    found = read_traffic(path).requests
    assert [request.arrival_s for request in found] == pytest.approx(arrivals)
    assert [(request.input_tokens, request.output_tokens) for request in found] == tokens
    assert {request.block_tokens for request in found} == {block_tokens}
    assert {request.block_tokens for request in read_traffic(path, block_tokens=32).requests} == {32}


@pytest.mark.parametrize(
    ("line", "column"),
    [
        (
            b'{"conversation_id": "x", "model": "m", "conversation": [{"role": "user", "content": "hi"}]}',
            "conversation",
        ),
        (b'{"custom_id": "r-1", "method": "POST", "body": {"messages": []}}', "body"),
        (b'{"prompt": "hi", "output_tokens": 12}', "prompt"),
    ],
    ids=["LMSYS and WildChat", "OpenAI batch", "vLLM custom"],
)
def test_texts_are_refused_with_what_to_do(tmp_path: Path, line: bytes, column: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ScenarioError) as error:
        read_traffic(path)
    assert str(error.value) == (
        f"{path}: {column} as text (ShareGPT, LMSYS, WildChat) hold neither times nor token counts: count tokens with "
        "the model's tokenizer, and give columns arrival_s, input_tokens, output_tokens"
    )


HEAD = "arrival_s,input_tokens,output_tokens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD},Adapter\n0,10,2,a\n", "column 'Adapter': is not read under that name: call it adapter"),
        (f"{HEAD},image\n0,10,2,1\n", "column 'image': is not read under that name: call it images"),
        (f"{HEAD},images,Image-Width\n0,10,2,1,7\n", "'Image-Width': is not read under that name: call it image_width"),
        (f"{HEAD},image_width\n0,10,2,640\n", "line 2: image_width = 640: is of images: say in images how many"),
        (f"{HEAD},images,image_height\n0,10,2,,480\n", "image_height = 480: is of images: say in images how many"),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": 2, "image_width": 7}\n',
            "image_width = 7: is of images",
        ),
    ],
)
def test_a_column_that_would_be_passed_over_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "requests"
    path.write_text(text)
    with pytest.raises(ScenarioError) as error:
        read_traffic(path)
    assert message in str(error.value)


def test_a_column_of_adapters_that_names_none_is_no_missing_column(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(f"{HEAD},adapter\n0,10,2,\n1,10,2,\n")
    assert read_traffic(path).adapters == ()
    path.write_text(f"{HEAD}\n0,10,2\n")
    assert read_traffic(path).adapters is None
