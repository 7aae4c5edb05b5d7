"""What work is: einsum models, layouts, and the kernels that every rank runs."""

from workloads.errors import WorkloadError
from workloads.families.transformer import Options, build_generate, build_program
from workloads.memory import MemoryNeed, memory_need
from workloads.model import ModelSpec, list_models, load_model, params
from workloads.parallel import Layout
from workloads.stack import load_stack
from workloads.work import DType

__all__ = [
    "DType",
    "Layout",
    "MemoryNeed",
    "ModelSpec",
    "Options",
    "WorkloadError",
    "build_generate",
    "build_program",
    "list_models",
    "load_model",
    "load_stack",
    "memory_need",
    "params",
]
