"""What work is: einsum models, layouts, and the kernels that every rank runs."""
# wattline's own: sim/neighbours.py looks for this line, which another distribution's package of this name has not.

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workloads.catalog import list_models, load_model
from workloads.errors import WorkloadError
from workloads.families.images import build_images
from workloads.families.options import Options, check_options, choice_of
from workloads.families.pipeline import stage_bytes
from workloads.families.transformer import Generation, build_generate, build_program
from workloads.kernel_names import AllReduce, EpKernels
from workloads.layout_checks import cache_copies, check_layout, check_served
from workloads.memory import MemoryLoad, MemoryNeed, memory_need, stage_needs
from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.params import params
from workloads.popularity import Zipf, parse_popularity
from workloads.positions import beyond, check_reach
from workloads.program import Program
from workloads.routing import Routing, busiest_spread, expert_loads
from workloads.stack import load_stack
from workloads.work import DType

if TYPE_CHECKING:
    from workloads.families.ragged import RaggedStep, build_ragged, build_spread
    from workloads.families.ragged_groups import Group, SharedTokens, own_tokens, tokens_of
    from workloads.families.speculation import (
        Drafter,
        Speculation,
        build_speculative,
        build_speculative_generate,
        check_draft,
        own_layer,
        tokens_a_step,
    )
    from workloads.families.training import build_training
    from workloads.families.training_memory import training_need

__all__ = [
    "AllReduce",
    "DType",
    "Drafter",
    "EpKernels",
    "Generation",
    "Group",
    "Layout",
    "MemoryLoad",
    "MemoryNeed",
    "ModelSpec",
    "Options",
    "Program",
    "RaggedStep",
    "Routing",
    "SharedTokens",
    "Speculation",
    "WorkloadError",
    "Zipf",
    "beyond",
    "build_generate",
    "build_images",
    "build_program",
    "build_ragged",
    "build_speculative",
    "build_speculative_generate",
    "build_spread",
    "build_training",
    "busiest_spread",
    "cache_copies",
    "check_draft",
    "check_layout",
    "check_options",
    "check_reach",
    "check_served",
    "choice_of",
    "expert_loads",
    "list_models",
    "load_model",
    "load_stack",
    "memory_need",
    "own_layer",
    "own_tokens",
    "params",
    "parse_popularity",
    "stage_bytes",
    "stage_needs",
    "tokens_a_step",
    "tokens_of",
    "training_need",
]

# Builders that few runs need, and the modules that they load when one does: 6 ms of a first run.
_HOMES = {
    "workloads.families.ragged": ("RaggedStep", "build_ragged", "build_spread"),
    "workloads.families.ragged_groups": ("Group", "SharedTokens", "own_tokens", "tokens_of"),
    "workloads.families.speculation": (
        "Drafter",
        "Speculation",
        "build_speculative",
        "build_speculative_generate",
        "check_draft",
        "own_layer",
        "tokens_a_step",
    ),
    "workloads.families.training": ("build_training",),
    "workloads.families.training_memory": ("training_need",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(home), name)
            globals()[name] = found  # asked for once
            return found
    raise AttributeError(f"module 'workloads' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
