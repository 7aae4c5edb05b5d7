"""Kernels that PyTorch launches, one an operation, for diffusion transformers as ``diffusers`` writes them.

Written after the modules of diffusers 0.42 (Wan2.1, FLUX.1, HunyuanVideo): norms and modulation without fusion,
partly in 32 bit, rotation by strided products, FlashAttention 2 through ``scaled_dot_product_attention``, and the
convolutions of their VAEs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hardware.calibrate.suite.case import Case
from hardware.calibrate.suite.timing import Bench
from hardware.errors import HardwareError

Row = Mapping[str, Any]
Launch = Callable[[], object]
HEAD_DIM = 128
TEXT_TOKENS = 512
PADDED_TEXT_TOKENS = 200  # of HunyuanVideo's 256: a prompt of 56, an assumption; the mask is read, hiding saves nothing
_EPS = 1e-6


def build_diffusers(bench: Bench, row: Row) -> Case:
    """The work of a row whose kind begins with ``diffusers_``."""
    match row["kind"]:
        case "diffusers_pass":
            launch = _pass(bench, row["how"], row["tokens"], row["width"])
            return Case(launch=lambda _: launch())
        case "diffusers_attention":
            return _attention(bench, row)
        case "diffusers_linear":
            return _linear(bench, row)
        case "diffusers_conv":
            return _convolution(bench, row)
        case "diffusers_image":
            image = _image(bench, row)
            return Case(launch=lambda _: image())
        case other:
            raise HardwareError(f"the suite has no kernel of diffusers '{other}'")


def _pass(bench: Bench, how: str, tokens: int, width: int) -> Launch:
    """One memory-bound kernel over ``tokens`` rows of ``width``."""
    torch = bench.torch
    functional = torch.nn.functional
    x, row = bench.randn(1, tokens, width), bench.randn(1, 1, width)
    heads = width // HEAD_DIM

    def wide(*shape: int) -> Any:
        return torch.randn(*shape, device=bench.device, dtype=torch.float32)

    by_head = x.view(1, tokens, heads, HEAD_DIM)
    halves = by_head.unflatten(-1, (-1, 2)).unbind(-1)
    match how:
        case "cast_up":
            return lambda: x.float()
        case "cast_down":
            x32 = wide(1, tokens, width)
            return lambda: x32.to(torch.bfloat16)
        case "layer_norm_f32":
            x32 = wide(1, tokens, width)
            return lambda: functional.layer_norm(x32, (width,), None, None, _EPS)
        case "layer_norm":
            return lambda: functional.layer_norm(x, (width,), None, None, _EPS)
        case "rms_norm":
            gain = bench.randn(width)
            return lambda: functional.rms_norm(x, (width,), gain, _EPS)
        case "head_rms_norm":
            gain = bench.randn(HEAD_DIM)
            return lambda: functional.rms_norm(by_head, (HEAD_DIM,), gain, _EPS)
        case "row_f32":
            x32, row32 = wide(1, tokens, width), wide(1, 1, width)
            return lambda: x32 * row32
        case "row_mixed":
            row32 = wide(1, 1, width)
            return lambda: x * row32
        case "row":
            return lambda: x * row
        case "add_f32":
            x32, y32 = wide(1, tokens, width), wide(1, tokens, width)
            return lambda: x32 + y32
        case "add":
            y = bench.randn(1, tokens, width)
            return lambda: x + y
        case "square":
            x32 = wide(1, tokens, width)
            return lambda: x32.pow(2)
        case "head_mean":
            x32 = wide(1, tokens, heads, HEAD_DIM)
            return lambda: x32.mean(-1, keepdim=True)
        case "head_scale":
            scale = wide(1, tokens, heads, 1)
            return lambda: by_head * scale
        case "head_gain":
            gain = bench.randn(HEAD_DIM)
            return lambda: by_head * gain
        case "negate_half":
            return lambda: -halves[1]
        case "interleave":
            low, high = bench.randn(1, tokens, heads, HEAD_DIM // 2), halves[0]
            return lambda: torch.stack([low, high], dim=-1)
        case "table_f32":
            x32, table = wide(1, tokens, heads, HEAD_DIM), wide(1, tokens, 1, HEAD_DIM)
            return lambda: x32 * table
        case "half_product":
            table = wide(1, tokens, 1, HEAD_DIM)[..., 0::2]
            return lambda: halves[0] * table
        case "half_add_f32":
            low, high = wide(1, tokens, heads, HEAD_DIM // 2), wide(1, tokens, heads, HEAD_DIM // 2)
            return lambda: low + high
        case "half_store":
            half, out = wide(1, tokens, heads, HEAD_DIM // 2), torch.empty_like(by_head)
            return lambda: out[..., 0::2].copy_(half)
        case "gelu":
            return lambda: functional.gelu(x, approximate="tanh")
        case "cat_tokens":
            words, image = x[:, :TEXT_TOKENS], x[:, TEXT_TOKENS:]
            words, image = words.clone(), image.clone()
            return lambda: torch.cat([words, image], dim=1)
        case "cat_width":
            near, far = bench.randn(1, tokens, width // 5), bench.randn(1, tokens, width - width // 5)
            return lambda: torch.cat([near, far], dim=2)
        case "copy_tokens":
            image = bench.randn(1, tokens + TEXT_TOKENS, width)[:, TEXT_TOKENS:]
            return lambda: image.clone(memory_format=torch.contiguous_format)
        case other:
            raise HardwareError(f"the suite has no pass of diffusers '{other}'")


def _image(bench: Bench, row: Row) -> Launch:
    """What runs between a VAE decoder's convolutions, over ``channels`` of an image or of ``frames`` of a video.

    ``batch`` of them at once (without it: one); ``layout`` nhwc: their channels lie innermost.
    """
    torch, functional = bench.torch, bench.torch.nn.functional
    dtype = torch.float32 if row["dtype"] == "f32" else torch.bfloat16
    channels, video = row["channels"], bool(row["frames"])
    sizes = [row["frames"]] if video else []

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device=bench.device, dtype=dtype)

    batch = int(row.get("batch") or 1)
    x = made(batch, channels, *sizes, row["height"], row["width"])
    if row.get("layout") == "nhwc":
        x = x.to(memory_format=torch.channels_last)
    a_channel = made(channels, *(1 for _ in x.shape[2:]))
    match row["how"]:
        case "group_norm":
            gain, shift = made(channels), made(channels)
            return lambda: functional.group_norm(x, 32, gain, shift, _EPS)
        case "normalize":  # norms over channels, their lower bound, quotients: three kernels
            return lambda: functional.normalize(x, dim=1)
        case "times":
            return lambda: x * 2.0
        case "plus":
            return lambda: x + 0.0
        case "gain":
            return lambda: x * a_channel
        case "bias":
            return lambda: x.add_(a_channel)
        case "silu":
            return lambda: functional.silu(x)
        case "upsample":
            scale = (1.0, 2.0, 2.0) if video else 2.0
            return lambda: functional.interpolate(x, scale_factor=scale, mode="nearest")
        case "upsample_exact":  # frames one by one
            frames = made(row["frames"], channels, row["height"], row["width"])
            return lambda: functional.interpolate(frames, scale_factor=(2.0, 2.0), mode="nearest-exact")
        case "pad":
            return lambda: functional.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate")
        case "pad_zero":  # behind the two frames before: a fill and a copy
            return lambda: functional.pad(x, (1, 1, 1, 1))
        case "cat_frames":  # two copies
            before = made(1, channels, 2, row["height"], row["width"])
            return lambda: torch.cat([before, x], dim=2)
        case "last_frames":
            return lambda: x[:, :, -2:].clone()
        case "to_frames":
            return lambda: x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        case "scale":
            return lambda: x / 1.0
        case "add":
            y = torch.randn_like(x)
            return lambda: x + y
        case "swap_add" | "swap_copy":  # beside or of tokens of all channels
            rows = made(batch, *x.shape[2:], channels).movedim(-1, 1)
            if row["how"] == "swap_add":
                return lambda: rows + x
            return lambda: rows.clone(memory_format=torch.contiguous_format)
        case other:
            raise HardwareError(f"the suite has no kernel of a VAE '{other}'")


def _attention(bench: Bench, row: Row) -> Case:
    """Attention over all tokens through one backend of PyTorch; heads lie side by side as projections leave them.

    ``masked``: with HunyuanVideo's mask of padded text, a row of bool over the keys of which the last are false.
    """
    torch = bench.torch
    batch, heads, dim = row["batch"], row["heads"], row["head_dim"]
    dtype = torch.float32 if row.get("dtype") == "f32" else torch.bfloat16

    def by_head(tokens: int) -> Any:
        return torch.randn(batch, tokens, heads, dim, device=bench.device, dtype=dtype).transpose(1, 2)

    q, k, v = by_head(row["seq_len"]), by_head(row["kv_len"]), by_head(row["kv_len"])
    mask = None
    if row.get("masked"):
        mask = torch.ones(batch, 1, 1, row["kv_len"], dtype=torch.bool, device=bench.device)
        mask[..., -PADDED_TEXT_TOKENS:] = False
    attend = torch.nn.functional.scaled_dot_product_attention
    if bench.dry:
        return Case(launch=lambda _: attend(q, k, v, attn_mask=mask))
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[row["backend"]]

    def launch(_: int) -> object:
        with sdpa_kernel(backend):
            return attend(q, k, v, attn_mask=mask)

    return Case(launch=launch)


def _linear(bench: Bench, row: Row) -> Case:
    """A linear layer with its bias."""
    linear = bench.torch.nn.functional.linear
    x, bias = bench.randn(1, row["m"], row["k"]), bench.randn(row["n"])
    weights = bench.weights(row["n"], row["k"])
    return Case(launch=lambda i: linear(x, weights[i % len(weights)], bias), rotate=len(weights))


def _convolution(bench: Bench, row: Row) -> Case:
    """A convolution of a VAE's decoder over ``frames`` (0: an image) of ``height`` x ``width``.

    ``kernel`` wide in space, and in time but for ``kernel_time``. ``layout`` nhwc: the product alone, in its own order
    of numbers and without bias; nhwc_input: the input's channels lie innermost, weights and bias are as everywhere.
    """
    torch, kernel = bench.torch, int(row["kernel"])
    dtype = torch.float32 if row["dtype"] == "f32" else torch.bfloat16
    video, alone = bool(row["frames"]), row.get("layout") == "nhwc"
    taps = int(row.get("kernel_time") or kernel)
    layer = torch.nn.Conv3d if video else torch.nn.Conv2d
    made = layer(
        row["channels_in"], row["channels_out"], (taps, kernel, kernel) if video else kernel,
        padding=(0, kernel // 2, kernel // 2) if video else kernel // 2,
        bias=not alone, device=bench.device, dtype=dtype,
    )  # fmt: skip
    along = [row["frames"] + taps - 1] if video else []  # time is padded by the frames before
    x = torch.randn(
        row["batch"], row["channels_in"], *along, row["height"], row["width"], device=bench.device, dtype=dtype
    )
    if alone:
        order = torch.channels_last_3d if video else torch.channels_last
        made, x = made.to(memory_format=order), x.to(memory_format=order)
    elif row.get("layout") == "nhwc_input":
        x = x.to(memory_format=torch.channels_last)

    def launch(_: int) -> object:
        with torch.no_grad():
            return made(x)

    return Case(launch=launch)
