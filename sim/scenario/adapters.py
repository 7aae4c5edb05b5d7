"""The fields that say which low-rank adapters (LoRA) stand beside a model, which scenarios and servers have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator

from sim.scenario.field_table import comma_separated
from workloads.families.adapters import Adapters

Module = Literal[
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "q_a_proj",
    "kv_a_proj_with_mqa", "q_b_proj", "experts",
]  # fmt: skip
# Ranks that vLLM has slots of: an adapter of another rank takes the next wider one.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA_RANK = f"rank of the adapters' slots and kernels, as wide as the widest of them: {', '.join(map(str, RANKS))}"
LORA_TARGETS = (
    "products that have adapters, comma-separated: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; of "
    "latent attention q_a_proj, kv_a_proj_with_mqa, q_b_proj; experts [default: all that the model has, but experts]"
)
LORA_FIELDS = ("lora_adapters", "max_lora_rank", "lora_targets")


def _slot(rank: int) -> int:
    if rank not in RANKS:
        wider = next((str(known) for known in RANKS if known > rank), "at most 512")
        raise ValueError(f"vLLM has slots of {', '.join(map(str, RANKS))}: give {wider}")
    return rank


LoraRank = Annotated[int, AfterValidator(_slot)]
LoraTargets = Annotated[tuple[Module, ...], BeforeValidator(comma_separated)]


class Adapted(Protocol):
    """What has the fields."""

    lora_adapters: int
    max_loras: int | None
    max_lora_rank: int
    lora_targets: tuple[Module, ...] | None


def check_adapters(fields: Adapted, defaults: Mapping[str, Any], *, batch: int) -> None:
    """Raise where something is said of adapters that are not there, or more of them are asked for than by one of
    ``batch`` sequences each."""
    if not fields.lora_adapters:
        check_unused(fields, defaults, (*LORA_FIELDS[1:], "max_loras"))
    elif fields.lora_adapters > batch:
        raise ValueError(
            f"lora_adapters = {fields.lora_adapters}: a sequence asks for one, batch = {batch}: give at most {batch}"
        )
    elif fields.max_loras is not None and fields.max_loras < fields.lora_adapters:
        raise ValueError(
            f"max_loras = {fields.max_loras}: a step asks for lora_adapters = {fields.lora_adapters}: give no fewer"
        )


def check_unused(fields: object, defaults: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise where one of ``names``, which are of adapters, is not its default."""
    for name in names:
        if (value := getattr(fields, name)) != defaults[name]:
            said = ",".join(value) if isinstance(value, tuple) else value
            raise ValueError(f"{name} = {said}: is of adapters: give lora_adapters, how many there are")


def adapters_in(
    fields: Adapted, *, distinct: int | None = None, rows: int | None = None, tokens: int | None = None
) -> Adapters | None:
    """Those of a step in which ``rows`` of ``tokens`` (None: all) ask for ``distinct`` of them (None: all); None: there
    are none."""
    if not fields.lora_adapters:
        return None
    return Adapters(
        rank=fields.max_lora_rank,
        modules=fields.lora_targets or (),
        distinct=fields.lora_adapters if distinct is None else distinct,
        rows=rows,
        slots=fields.max_loras or fields.lora_adapters,
        tokens=tokens,
    )
