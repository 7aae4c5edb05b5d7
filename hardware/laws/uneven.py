"""Decode attention over contexts of unequal length where no sequence is cut up (flash-attention 2).

Such a kernel gives each sequence and KV head one block of threads. Blocks start in order, all sequences of one head
before the next head's; a block that streams a long cache runs alone when the others have ended. Kernels that split long
sequences (flash-attention 3, FlashInfer) end at about the same time on all SMs: the mean context stands for them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of one block of threads, fitted on the rows "fit" of records/h100-sxm-80gb/serving/uneven_attention.jsonl
# (docs/laws.md). One block is bound by latency, not bandwidth: on other GPUs nothing was measured.
BLOCK_BYTES_PER_S = 14.2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenContexts:
    """``batch`` contexts of ``mean`` and at most ``longest`` tokens; ``token_bytes``: K and V of a token and head."""

    batch: int
    mean: float
    longest: float
    kv_heads: int
    token_bytes: int


def longest_tail_s(contexts: UnevenContexts, *, even_s: float, sms: int) -> float:
    """Seconds that the longest context adds to a call that would take ``even_s`` if all were as long as the mean.

    The last head's long block starts, on average, when all but half
    a head's blocks and one wave of SMs have been given out.

    >>> contexts = UnevenContexts(batch=128, mean=1024, longest=5551, kv_heads=8, token_bytes=512)
    >>> long_s = longest_tail_s(contexts, even_s=229e-6, sms=132)
    >>> round((229e-6 + long_s) * 1e6)  # measured: 356
    377
    """
    batch, mean = contexts.batch, contexts.mean
    given_out = max(0.0, 1.0 - 0.5 / contexts.kv_heads - sms / (batch * contexts.kv_heads))

    def after_s(tokens: float) -> float:
        start_s = given_out * (1.0 - tokens / (batch * mean)) * even_s
        return max(0.0, start_s + tokens * contexts.token_bytes / BLOCK_BYTES_PER_S - even_s)

    return max(0.0, after_s(contexts.longest) - after_s(mean))
