"""What the host launches kernel by kernel: steps, decoders and text encoders of real modules with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from hardware.calibrate.suite.profiled import profile_steps
from hardware.calibrate.suite.timing import Bench, steady, together
from hardware.errors import HardwareError

Row = Mapping[str, Any]
Step = Callable[[], object]
_STEP_WINDOW_S = 1.05


def measure_diffusers(bench: Bench, row: Row) -> dict[str, Any]:
    """Latency, power and energy of a row that the host launches kernel by kernel, in the steady state."""
    torch = bench.torch
    with torch.no_grad(), _attention_backend(bench, row.get("backend")):
        step = _PREPARED[row["kind"]](bench, row)
        step()
        bench.synchronize()
        measured = together(bench, steady(bench, lambda: _ignore(step()), 1, window_s=_STEP_WINDOW_S))
        if bench.traces is not None:
            parts = (row.get(key) for key in ("model", "encoder", "kind", "video", "layers", "tokens", "extent"))
            name = "-".join(str(part).removeprefix("diffusers_") for part in parts if part is not None)
            for how in ("ulysses", "ring"):
                name += f"-{how}{row[how]}" if how in row else ""
            end = f".rank{bench.comm.rank}" if bench.comm.world > 1 else ""
            profile_steps(bench, lambda: _ignore(step()), bench.traces / f"{name}{end}.json.gz")
    return measured


def _attention_backend(bench: Bench, name: str | None) -> AbstractContextManager[object]:
    """PyTorch's own choice of attention, or FlashAttention 2 (``flash``)."""
    if name is None or bench.dry:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return cast(AbstractContextManager[object], sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION}[name]))


def _step(bench: Bench, row: Row) -> Step:
    """One forward pass of the first ``layers`` (Wan2.1), or as many double and single ones."""
    torch, device = bench.torch, bench.device
    width, height, frames = (int(size) for size in row["video"].split("x"))
    batch, layers = row["batch"], row["layers"]

    def ready(model: Any) -> Any:
        """Weights in bf16 but for those that diffusers keeps in 32 bit when it loads a model."""
        wide = getattr(model, "_keep_in_fp32_modules", None) or ()
        for name, parameter in model.named_parameters():
            if not any(part in name for part in wide):
                parameter.data = parameter.data.to(torch.bfloat16)
        return _shared_out(model.eval(), row)

    words = bench.randn(batch, row["text_tokens"], 4096)
    time = torch.full((batch,), 500.0, device=device)
    match row["model"]:
        case "wan2.1-14b" | "wan2.1-1.3b":
            from diffusers import WanTransformer3DModel

            sizes = {} if row["model"] == "wan2.1-14b" else {"num_attention_heads": 12, "ffn_dim": 8960}
            with torch.device(device):
                model = ready(WanTransformer3DModel(num_layers=layers, **sizes))
            latents = bench.randn(batch, 16, 1 + (frames - 1) // 4, height // 8, width // 8)
            return lambda: model(hidden_states=latents, timestep=time, encoder_hidden_states=words, return_dict=False)
        case "flux.1-dev":
            from diffusers import FluxTransformer2DModel

            with torch.device(device):
                flux = ready(
                    FluxTransformer2DModel(num_layers=layers, num_single_layers=2 * layers, guidance_embeds=True)
                )
            tokens = (height // 16) * (width // 16)
            packed, pooled = bench.randn(batch, tokens, 64), bench.randn(batch, 768)
            places = torch.zeros(tokens, 3, device=device)
            text_places = torch.zeros(row["text_tokens"], 3, device=device)
            return lambda: flux(
                hidden_states=packed,
                encoder_hidden_states=words,
                pooled_projections=pooled,
                timestep=time.to(torch.bfloat16) / 1000,
                img_ids=places,
                txt_ids=text_places,
                guidance=torch.full((batch,), 3.5, device=device),
                return_dict=False,
            )
        case "hunyuan-video":
            from diffusers import HunyuanVideoTransformer3DModel

            with torch.device(device):
                hunyuan = ready(HunyuanVideoTransformer3DModel(num_layers=layers, num_single_layers=2 * layers))
            latents = bench.randn(batch, 16, 1 + (frames - 1) // 4, height // 8, width // 8)
            mask = torch.ones(batch, row["text_tokens"], device=device, dtype=torch.bool)
            pooled = bench.randn(batch, 768)
            return lambda: hunyuan(
                hidden_states=latents,
                timestep=time,
                encoder_hidden_states=words,
                encoder_attention_mask=mask,
                pooled_projections=pooled,
                guidance=torch.full((batch,), 6000.0, device=device),
                return_dict=False,
            )
        case other:
            raise HardwareError(f"the suite has no model of diffusers '{other}'")


def _shared_out(model: Any, row: Row) -> Any:
    """The model over ``ulysses`` x ``ring`` GPUs that share its tokens, as diffusers does it (one process each)."""
    ulysses, ring = int(row.get("ulysses") or 1), int(row.get("ring") or 1)
    if ulysses * ring == 1:
        return model
    from diffusers import ContextParallelConfig

    if ring > 1:  # rounds are merged by their log-sum-exp, which PyTorch's own choice of attention does not return
        model.set_attention_backend("_native_cudnn")
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring))
    return model


def _decode(bench: Bench, row: Row) -> Step:
    """One video or image through the VAE's decoder."""
    torch, device = bench.torch, bench.device
    width, height, frames = (int(size) for size in row["video"].split("x"))
    dtype = torch.float32 if row["dtype"] == "f32" else torch.bfloat16
    with torch.device(device):
        match row["model"]:
            case "wan2.1-14b":
                from diffusers import AutoencoderKLWan

                vae = AutoencoderKLWan()
            case "flux.1-dev":
                from diffusers import AutoencoderKL

                vae = AutoencoderKL(
                    down_block_types=("DownEncoderBlock2D",) * 4,
                    up_block_types=("UpDecoderBlock2D",) * 4,
                    block_out_channels=(128, 256, 512, 512),
                    layers_per_block=2,
                    latent_channels=16,
                    use_quant_conv=False,
                    use_post_quant_conv=False,
                )
            case "hunyuan-video":
                from diffusers import AutoencoderKLHunyuanVideo

                vae = AutoencoderKLHunyuanVideo()
                vae.enable_tiling()
            case other:
                raise HardwareError(f"the suite has no decoder of diffusers '{other}'")
    vae = vae.to(dtype).eval()
    sizes = [1 + (frames - 1) // 4] if row["model"] != "flux.1-dev" else []
    latents = torch.randn(row["batch"], 16, *sizes, height // 8, width // 8, device=device, dtype=dtype)
    return lambda: vae.decode(latents, return_dict=False)


def _encode(bench: Bench, row: Row) -> Step:
    """A prompt of ``tokens`` through the text encoder of the row's model, or through its second one, CLIP's."""
    torch = bench.torch
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        LlamaConfig,
        LlamaModel,
        T5Config,
        T5EncoderModel,
        UMT5Config,
        UMT5EncoderModel,
    )

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    with torch.device(bench.device):
        match row.get("encoder", row["model"]):
            case "clip":
                encoder = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                                       num_attention_heads=12, vocab_size=49408))  # fmt: skip
            case "flux.1-dev":
                encoder = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))
            case "wan2.1-14b":
                encoder = UMT5EncoderModel(UMT5Config(**sizes, feed_forward_proj="gated-gelu"))
            case "hunyuan-video":
                llama = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                    num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)  # fmt: skip
                encoder = LlamaModel(llama)
            case other:
                raise HardwareError(f"the suite has no text encoder of '{other}'")
    encoder = encoder.to(torch.bfloat16).eval()
    words = torch.ones(row["batch"], row["tokens"], device=bench.device, dtype=torch.long)
    return lambda: encoder(words, attention_mask=words)


def _blend(bench: Bench, row: Row) -> Step:
    """Two tiles blended row by row over ``extent`` rows of pixels, as tiled decoders do: four small kernels a row."""
    sizes = (1, 3, row["frames"], row["height"], row["width"])
    above, tile, extent = bench.randn(*sizes), bench.randn(*sizes), row["extent"]

    def blend() -> None:
        for y in range(extent):
            tile[:, :, :, y, :] = above[:, :, :, -extent + y, :] * (1 - y / extent) + tile[:, :, :, y, :] * (y / extent)

    return blend


_PREPARED: dict[str, Callable[[Bench, Row], Step]] = {
    "diffusers_step": _step, "diffusers_decode": _decode, "diffusers_text": _encode, "diffusers_blend": _blend,
}  # fmt: skip


def _ignore(_: object) -> None:
    return None
