"""The plan ``diffusers``: PyTorch's kernels under diffusion transformers, and steps of the real modules to check by."""

from __future__ import annotations

from itertools import product

from hardware.calibrate.suite.plan import PlannedRow

# Kernels as diffusers 0.42 launches them, with the bytes that each reads and writes for an element of its tensor.
PASS_BYTES = {
    "cast_up": 6, "cast_down": 6, "layer_norm_f32": 8, "layer_norm": 4, "rms_norm": 4, "head_rms_norm": 4,
    "row_f32": 8, "row_mixed": 6, "row": 4, "add_f32": 12, "add": 6, "square": 8, "head_mean": 4, "head_scale": 6,
    "head_gain": 4, "negate_half": 3, "interleave": 4, "table_f32": 8, "half_product": 4, "half_add_f32": 6,
    "half_store": 4, "gelu": 4, "cat_tokens": 4, "cat_width": 4, "copy_tokens": 4,
}  # fmt: skip
# Tokens and width: text of FLUX.1, its image and text, and Wan2.1-14B and HunyuanVideo whole and in eighths.
PASS_SIZES = ((1024, 3072), (4608, 3072), (4096, 5120), (14848, 3072), (32760, 5120))
# Tokens and heads of self-attention, whole and with heads over two, four and eight GPUs.
SELF_ATTENTION = (
    (1024, 24), (4608, 24), (4608, 12), (4608, 6), (4608, 3), (9216, 24), (16384, 12), (32760, 40), (32760, 12),
    (32760, 5), (75600, 5), (75600, 10), (119056, 3), (119056, 24),
)  # fmt: skip
# With HunyuanVideo's mask of padded text.
MASKED_ATTENTION = (
    (1024, 24), (4608, 24), (4608, 6), (9216, 24), (16384, 12), (25696, 24), (32760, 12), (75600, 5), (119056, 3),
)  # fmt: skip
STEPS = (
    ("wan2.1-14b", "832x480x81", (1, 3)),
    ("wan2.1-1.3b", "832x480x81", (10,)),
    ("flux.1-dev", "1024x1024x1", (2, 6)),
    ("hunyuan-video", "1280x720x129", (1,)),
    ("hunyuan-video", "848x480x61", (2,)),
)
# With FlashAttention 2 instead of PyTorch's own choice.
FLASH_STEPS = (("wan2.1-14b", "832x480x81", 3), ("flux.1-dev", "1024x1024x1", 6), ("hunyuan-video", "848x480x61", 2))
# So few tokens that the host sets the pace.
HOST_STEPS = (
    ("wan2.1-14b", "64x64x5", (1, 3)),
    ("flux.1-dev", "64x64x1", (2, 6)),
    ("hunyuan-video", "64x64x5", (1, 3)),
)
# Tokens over several GPUs, by all-to-alls (ulysses) and by a ring.
SHARED_STEPS = (("wan2.1-14b", "832x480x81", 3), ("flux.1-dev", "1024x1024x1", 6))
DECODERS = (
    ("flux.1-dev", "1024x1024x1", "bf16"),
    ("wan2.1-14b", "832x480x81", "f32"),
    ("hunyuan-video", "848x480x61", "bf16"),
)


def diffusers(world: int) -> list[PlannedRow]:
    """Attention, memory-bound kernels, products with a bias, convolutions; then steps and decoders.

    With several GPUs: steps whose tokens they share.
    """
    if world > 1:
        return [{**step(*one), "world": world, how: world} for one, how in product(SHARED_STEPS, ("ulysses", "ring"))]
    rows: list[PlannedRow] = []
    attention = {"kind": "diffusers_attention", "world": 1, "batch": 1, "head_dim": 128}
    for backend, sizes in (
        ("flash", SELF_ATTENTION),
        ("efficient", SELF_ATTENTION[1:9:3]),
        ("cudnn", SELF_ATTENTION[1:8:6]),
    ):
        rows += [
            {**attention, "seq_len": tokens, "kv_len": tokens, "heads": heads, "backend": backend}
            for tokens, heads in sizes
        ]
    rows += [
        {**attention, "seq_len": tokens, "kv_len": tokens, "heads": heads, "backend": "cudnn", "masked": True}
        for tokens, heads in MASKED_ATTENTION
    ]
    rows += [
        {**attention, "seq_len": tokens, "kv_len": 512, "heads": heads, "backend": "flash"}
        for tokens, heads in ((4095, 40), (16380, 40), (32760, 40), (32760, 12))
    ]
    rows += [
        {"kind": "diffusers_pass", "world": 1, "how": how, "tokens": tokens, "width": width}
        for how, (tokens, width) in product(PASS_BYTES, PASS_SIZES)
    ]
    rows += [
        {"kind": "diffusers_linear", "world": 1, "m": m, "n": n, "k": k}
        for m, n, k in (
            (32760, 5120, 5120), (32760, 13824, 5120), (32760, 5120, 13824), (4608, 3072, 3072), (4096, 12288, 3072),
            (4608, 3072, 15360), (512, 3072, 3072), (1, 18432, 3072),
        )
    ]  # fmt: skip
    conv = {"kind": "diffusers_conv", "world": 1, "batch": 1, "kernel": 3}
    rows += [
        {**conv, "frames": 0, "channels_in": c, "channels_out": o, "height": side, "width": side, "dtype": "bf16"}
        for c, o, side in ((512, 512, 128), (512, 512, 256), (512, 256, 512), (256, 256, 512), (128, 128, 1024))
    ]
    rows += [
        {**conv, "frames": f, "channels_in": c, "channels_out": c, "height": h, "width": w, "dtype": "f32"}
        for f, c, h, w in ((1, 384, 60, 104), (2, 384, 120, 208), (4, 192, 240, 416), (4, 96, 480, 832))
    ]
    rows += [step(model, video, layers) for model, video, many in (*STEPS, *HOST_STEPS) for layers in many]
    rows += [{**step(model, video, layers), "backend": "flash"} for model, video, layers in FLASH_STEPS]
    rows += [
        {
            "kind": "diffusers_decode",
            "world": 1,
            "model": model,
            "video": video,
            "layers": 0,
            "batch": 1,
            "dtype": dtype,
        }
        for model, video, dtype in DECODERS
    ]
    return rows


def step(model: str, video: str, layers: int) -> PlannedRow:
    """One forward pass of a transformer with ``layers``, or ``layers`` double and twice as many single ones."""
    row: PlannedRow = {"kind": "diffusers_step", "world": 1, "model": model, "video": video, "layers": layers}
    return row | {"batch": 1, "text_tokens": 256 if model == "hunyuan-video" else 512, "dtype": "bf16"}
