"""Names of kernels, collectives and ways to run them, as measurement records and laws spell them."""

from __future__ import annotations

from enum import StrEnum


class Elementwise(StrEnum):
    """Memory-bound kernels, named as in the measurement records."""

    COPY = "copy"
    PERMUTE_COPY = "permute_copy"
    ADD_RMSNORM = "add_rmsnorm"
    RMSNORM = "rmsnorm"
    SILU_MUL = "silu_mul"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    ADD = "add"
    SCALE = "scale"
    SOFTMAX = "softmax"
    LAYERNORM = "layernorm"
    ROPE = "rope"
    CAST_FP8 = "cast_fp8"
    GATHER = "gather"
    INDEX_ADD = "index_add"
    TOPK_SUM = "topk_sum"


class EngineOp(StrEnum):
    """Memory-bound kernels of engines, by the names of their laws: vLLM's, then those that ``diffusers`` runs."""

    ADD_RMSNORM = "compiled_add_rmsnorm"
    ADD_RMSNORM_FP8 = "compiled_add_rmsnorm_fp8"
    SILU_MUL = "compiled_silu_mul"
    SILU_MUL_FP8 = "compiled_silu_mul_fp8"
    ROPE = "compiled_rope"
    QUANTISE = "compiled_quantise"
    QUANTISE_TOKEN = "quantise_token"
    QUANTISE_BLOCK = "quantise_block"
    CACHE_WRITE = "cache_write"
    GATE = "gate"
    SMALL = "small"  # ``rows`` kernels too small to have a size, launched by the host
    LAUNCH = "launch"  # ``rows`` kernels that do nothing, in a loop
    SORT = "sort"  # ``rows`` tokens sorted by expert
    MAP = "map"  # ids of experts that live on other ranks
    EXPERT_ACT = "expert_act"
    EXPERT_SUM = "expert_sum"
    SAMPLE_GREEDY = "sample_greedy"
    SAMPLE_RANDOM = "sample_random"
    CAST_UP = "cast_up"
    CAST_DOWN = "cast_down"
    LAYER_NORM_F32 = "layer_norm_f32"
    LAYER_NORM = "layer_norm"
    ROWS_RMS_NORM = "rms_norm"
    HEAD_RMS_NORM = "head_rms_norm"
    ROW_F32 = "row_f32"
    ROW_MIXED = "row_mixed"
    ROW = "row"
    ADD_F32 = "add_f32"
    ADD = "add"
    SQUARE = "square"
    HEAD_MEAN = "head_mean"
    HEAD_SCALE = "head_scale"
    HEAD_GAIN = "head_gain"
    NEGATE_HALF = "negate_half"
    INTERLEAVE = "interleave"
    TABLE_F32 = "table_f32"
    HALF_PRODUCT = "half_product"
    HALF_ADD_F32 = "half_add_f32"
    HALF_STORE = "half_store"
    GELU = "gelu"
    CAT_TOKENS = "cat_tokens"
    CAT_WIDTH = "cat_width"
    HOST = "host"  # ``rows`` microseconds in which the host launches kernels, whatever the GPU does
    GROUP_NORM = "image_group_norm"  # of a VAE's decoder, from here on
    IMAGE_SILU = "image_silu"
    IMAGE_ADD = "image_add"
    IMAGE_SCALE = "image_scale"
    IMAGE_BIAS = "image_bias"
    UPSAMPLE = "image_upsample"
    UPSAMPLE_LAST = "image_upsample_nhwc"
    UPSAMPLE_VIDEO = "image_upsample_video"
    IMAGE_PAD = "image_pad"
    SWAP_ADD = "image_swap_add"
    SWAP_COPY = "image_swap_copy"
    CAT_FRAMES = "image_cat_frames"
    TO_FRAMES = "image_to_frames"
    NORMALIZE_F32 = "image_normalize_f32"
    TIMES_F32 = "image_times_f32"
    PLUS_F32 = "image_plus_f32"
    GAIN_F32 = "image_gain_f32"
    IMAGE_SILU_F32 = "image_silu_f32"
    IMAGE_ADD_F32 = "image_add_f32"
    IMAGE_BIAS_F32 = "image_bias_f32"
    PAD_ZERO_F32 = "image_pad_zero_f32"
    CAT_FRAMES_F32 = "image_cat_frames_f32"
    LAST_FRAMES_F32 = "image_last_frames_f32"
    TO_FRAMES_F32 = "image_to_frames_f32"
    SWAP_COPY_F32 = "image_swap_copy_f32"
    UPSAMPLE_F32 = "image_upsample_exact_f32"


class CollectiveOp(StrEnum):
    """Collectives, named as in the measurement records."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "sendrecv_ring"
    SEND = "send"
    BROADCAST = "broadcast"
    DISPATCH = "dispatch"
    COMBINE = "combine"


class EpKernels(StrEnum):
    """Kernels that exchange tokens with experts: for few tokens at once, or for many."""

    LOW_LATENCY = "low_latency"
    NORMAL = "normal"


class AllReduce(StrEnum):
    """How an all-reduce is done: the library's own choice (what was measured), or a named algorithm.

    ``auto`` chooses by size and world as serving engines do: one-shot, two-shot, then the library.
    """

    LIBRARY = "library"
    RING = "ring"
    TREE = "tree"
    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    NVLS = "nvls"
    AUTO = "auto"
