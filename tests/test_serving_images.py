"""Images in requests: tokens of their pixels, when they are encoded, and what that costs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sim.errors import ScenarioError
from sim.serving import serve
from sim.serving.cost import Batch, Chunk
from sim.serving.images import ImageRoom
from sim.serving.inflight import Limits, Sequence
from sim.serving.kv import BlockPool
from sim.serving.price import StepPrices
from sim.serving.requests import Request
from sim.serving.scheduler import Scheduler
from sim.serving.spec import ServeSpec
from sim.serving.stages import stage_prices
from tests import family_configs
from workloads import load_model

LLAVA = "llava-1.5-7b"
LOAD: dict[str, Any] = {"requests": 30, "rate_per_s": 4.0, "input_tokens": 200, "output_tokens": 20}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-VL-8B, which reads images at the size that they come in."""
    path = tmp_path_factory.mktemp("qwen3-vl") / "config.json"
    path.write_text(json.dumps(family_configs.QWEN3_VL_8B))
    return str(path)


def prices(model: str, **fields: Any) -> StepPrices:
    spec = ServeSpec.of(model=model, **fields)
    return stage_prices(spec, spec.group())[0]


@pytest.mark.parametrize(
    ("config", "size", "patches", "tokens"),
    [
        ("QWEN3_VL_8B", (1280, 720), 80 * 44, 40 * 22),  # cells of 32 pixels; 22.5 of them is an even number of halves
        ("QWEN3_VL_8B", (32, 32), 256, 64),  # scaled up to 65,536 pixels
        ("QWEN_VL_72B", (1000, 1000), 72 * 72, 36 * 36),
        ("PIXTRAL", (1024, 512), 64 * 32, 65 * 32),  # a token ends each row
        ("PIXTRAL", (4096, 1024), 64 * 16, 65 * 16),  # scaled down to 1,024 on a side
        ("LLAVA_NEXT", (64, 64), 2885, 2880),  # one size for all
    ],
)
def test_pixels_are_tokens_by_the_model_s_own_rule(
    config: str, size: tuple[int, int], patches: int, tokens: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(getattr(family_configs, config)))
    vision = load_model(str(path)).vision
    assert vision is not None and vision.of_image(size) == (patches, tokens)
    assert vision.of_image(None) == (vision.patches, vision.tokens)


def test_tokens_of_images_are_prompt(qwen: str) -> None:
    run = serve(model=qwen, images=2, image_width=1280, image_height=720, **LOAD)
    assert set(run.requests["input_tokens"]) == {200 + 2 * 880}
    assert run.summary["images"] == {"count": 60, "tokens": 60 * 880}
    assert run.summary["status"] == "unchecked"


def test_a_request_without_images_is_served_as_by_the_language_model() -> None:
    text = serve(model=LLAVA, **LOAD)
    none = serve(model=LLAVA, images=0, **LOAD)
    assert none.requests.equals(text.requests) and none.energy_j == text.energy_j and "images" not in text.summary
    same = prices(LLAVA).whole(Batch(chunks=(Chunk(700, 700),), ending=1))
    assert prices(LLAVA).whole(Batch(chunks=(Chunk(700, 700, 0, 577),), ending=1)) == same


def test_parts_of_a_step_are_the_step_in_one_run(qwen: str) -> None:
    for model, patches in ((LLAVA, 577), (qwen, 3520)):
        found = prices(model)
        for batch in (
            Batch(chunks=(Chunk(1400, 1400, 2, patches),), ending=1),
            Batch(decoding=6, cached=6000, chunks=(Chunk(900, 900, 1, patches), Chunk(400, 400)), ending=1),
        ):
            whole, exact = found.whole(batch), found.exact(batch)
            assert whole.time_s == pytest.approx(exact.time_s, rel=0.01)
            assert whole.energy_j == pytest.approx(exact.energy_j, rel=0.01)


def test_more_images_and_larger_ones_cost_more(qwen: str) -> None:
    found = prices(qwen)

    def cost(*images: tuple[int, int]) -> tuple[float, float]:
        chunks = tuple(Chunk(600, 600, count, patches) for count, patches in images)
        one = found.whole(Batch(chunks=chunks, ending=1))
        return one.time_s, one.energy_j

    order = [cost((0, 0), (0, 0)), cost((1, 1024), (0, 0)), cost((1, 2000), (0, 0)), cost((1, 2000), (1, 2000))]
    assert order == sorted(order) and [joules for _, joules in order] == sorted(joules for _, joules in order)
    assert order[3] == pytest.approx(cost((2, 2000), (0, 0)), rel=1e-12)  # encoded together, whoever asks
    parts = found.step(Batch(chunks=(Chunk(600, 600, 1, 2000), Chunk(600, 600, 3, 2000))))
    plain = found.step(Batch(chunks=(Chunk(600, 600), Chunk(600, 600))))
    more = [own.energy_j - bare.energy_j for own, bare in zip(parts.prompts, plain.prompts, strict=True)]
    assert more[1] == pytest.approx(3 * more[0], rel=1e-9)


def test_energy_of_requests_and_pauses_is_the_whole() -> None:
    run = serve(model=LLAVA, images=1, **LOAD)
    shares = run.requests["prefill_j"].sum() + run.requests["decode_j"].sum()
    assert shares + run.energy_j_by_part["idle"] == pytest.approx(run.energy_j, rel=1e-9)
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)


def test_a_first_token_waits_for_its_images() -> None:
    """Alone: the step of the prompt is longer by the encoder, or by the host that launches it kernel by kernel."""
    load = {"model": LLAVA, "requests": 1, "output_tokens": 2, "host": "none"}
    run, text = serve(**load, input_tokens=100, images=1), serve(**load, input_tokens=676)
    found = prices(LLAVA)
    encoder = found.whole(Batch(chunks=(Chunk(676, 676, 1, 577),), ending=1)).time_s
    plain = found.whole(Batch(chunks=(Chunk(676, 676),), ending=1)).time_s
    assert run.requests["ttft_s"][0] - text.requests["ttft_s"][0] == pytest.approx(encoder - plain, rel=1e-3)
    hosted = [
        serve(**(load | {"host": "stack"}), input_tokens=n, images=i).requests["ttft_s"][0]
        for n, i in ((100, 1), (676, 0))
    ]
    assert hosted[0] - hosted[1] > encoder - plain


@pytest.mark.parametrize("seed", range(4))
def test_images_are_encoded_once_and_never_beyond_their_room(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        limits=Limits(max_num_seqs=8, max_num_batched_tokens=48, preemption=rng.choice(["recompute", "swap"])),
        pool=BlockPool(blocks=50, block_tokens=4),
    )
    room = scheduler.images = ImageRoom(room=48)
    coming = []
    for number in range(40):
        images, each = rng.randint(0, 4), rng.choice([8, 20])
        coming.append(
            Request(number=number, arrival_s=float(number), input_tokens=images * each + rng.randint(1, 30),
                    output_tokens=rng.randint(1, 20), images=images, image_tokens=each, image_patches=4 * each)
        )  # fmt: skip
    coming.reverse()
    encoded: dict[int, int] = {}
    done: list[Sequence] = []
    while scheduler.busy or coming:
        if coming:
            request = coming.pop()
            scheduler.add(Sequence(request=request, target=request.input_tokens))
        step = scheduler.plan()
        for (sequence, _), chunk in zip(step.pieces, step.batch.chunks, strict=True):
            encoded[sequence.request.number] = encoded.get(sequence.request.number, 0) + chunk.images
            begun = -(-chunk.context // sequence.request.image_tokens) if sequence.request.images else 0
            assert sequence.encoded == min(sequence.request.images, begun)
        tokens = sum(
            c.images * s.request.image_tokens for (s, _), c in zip(step.pieces, step.batch.chunks, strict=True)
        )
        assert tokens <= 48 and 0 <= room.held <= 48
        done += scheduler.advance(step)[1]
    assert len(done) == 40 and room.held == 0
    for sequence in done:
        again = encoded[sequence.request.number] - sequence.request.images
        assert again == 0 or (again > 0 and sequence.preemptions > 0)


def test_a_file_says_how_many_and_how_large(qwen: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    head = "arrival_s,input_tokens,output_tokens,images,image_width,image_height\n"
    path.write_text(head + "0,50,4,2,640,640\n1,50,4,,,\n2,50,4,1,1280,720\n3,50,4,0,,\n")
    run = serve(model=qwen, trace=path)
    assert run.requests["image_tokens"].tolist() == [800, 0, 880, 0]
    assert run.requests["input_tokens"].tolist() == [850, 50, 930, 50]
    fixed = serve(model=LLAVA, trace=path)
    assert fixed.requests["input_tokens"].tolist() == [50 + 1152, 50, 50 + 576, 50]
    for row, message in (
        ("0,50,4,two,,", "images = two: give a whole number from 0 to 4,096"),
        ("0,50,4,1,0,9", "image_width = 0: give a whole number from 1 to 65,536"),
    ):
        path.write_text(head + row + "\n")
        with pytest.raises(Exception, match=message):
            serve(model=qwen, trace=path)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "prefill_replicas": 1},
        {"speculation": "eagle", "acceptance": 0.7},
        {"lora_adapters": 2, "max_loras": 2},
        {"concurrency": 4},
        {"max_num_batched_tokens": 300},
        {"kv_blocks": 150},
    ],
)
def test_whatever_else_a_server_does_every_request_is_served(fields: dict[str, Any]) -> None:
    load = {name: value for name, value in LOAD.items() if name != "rate_per_s" or "concurrency" not in fields}
    run = serve(**(load | fields), model=LLAVA, images=2)
    assert bool(run.requests["done_s"].notna().all())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama3-8b", "images": 1}, "images = 1: llama3-8b has no image encoder that is simulated"),
        ({"image_width": 100}, "image_width = 100: is of images"),
        ({"images": 1, "image_width": 100}, "image_width and image_height go together"),
        ({"images": 1, "pp": 2}, "images: not known beside pp"),
        ({"images": 1, "sm_partition": "prefill=64,decode=68"}, "images: not known beside sm_partition"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        serve(**({"model": LLAVA, "requests": 1} | fields))


def test_encoders_of_images_do_not_lend_a_step_its_status(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,images\n0,10,2,1\n")
    for fields in ({"images": 1, "requests": 1, "input_tokens": 10, "output_tokens": 2}, {"trace": str(path)}):
        reasons = serve(model=LLAVA, **fields).summary["status_reasons"]
        assert "no step with images was measured" in reasons
        assert not any("kernels of a step: calibrated" in reason for reason in reasons)


def test_hashes_beside_images_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [{"timestamp": 0, "input_length": 9, "output_length": 2, "images": 1}]
    rows.append({"timestamp": 1, "input_length": 600, "output_length": 2, "images": 1, "hash_ids": [1, 2]})
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ScenarioError, match="images: not known beside hash_ids"):
        serve(model=LLAVA, trace=str(path))
