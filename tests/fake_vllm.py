"""A stand-in for the package ``vllm``: requests generate tokens at a fixed pace, profiles leave a recorded trace."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class FakeVllm:
    """``step_s`` a token of any request; ``trace`` is what a profile leaves. ``started`` are arguments of engines."""

    step_s: float = 1e-3
    trace: Path | None = None
    started: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    asked: list[str | None] = field(default_factory=list)  # names of adapters, request by request
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)  # tensors by folder
    stopped: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the package where imports find it."""
        names = (
            "vllm",
            "vllm.engine",
            "vllm.engine.arg_utils",
            "vllm.v1",
            "vllm.v1.engine",
            "vllm.v1.engine.async_llm",
            "vllm.lora",
            "vllm.lora.request",
            "safetensors",
            "safetensors.numpy",
        )
        modules = {name: ModuleType(name) for name in names}
        root = modules["vllm"]
        root.__version__ = "0.24.0"  # type: ignore[attr-defined]
        root.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
        modules["vllm.engine.arg_utils"].AsyncEngineArgs = SimpleNamespace  # type: ignore[attr-defined]
        fake = self

        class AsyncLLM:
            @classmethod
            def from_engine_args(cls, arguments: SimpleNamespace) -> AsyncLLM:
                fake.started.append(vars(arguments))
                return cls()

            async def generate(
                self, prompt: dict[str, Any], sampling: Any, name: str, lora_request: tuple[Any, ...] | None = None
            ) -> AsyncIterator[Any]:
                assert sampling.ignore_eos and sampling.max_tokens == sampling.min_tokens and name
                fake.prompts.append(len(prompt["prompt_token_ids"]))
                fake.asked.append(None if lora_request is None else lora_request[0])
                await asyncio.sleep(fake.step_s)
                for count in range(1, sampling.max_tokens + 1):
                    await asyncio.sleep(fake.step_s)
                    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(count)))])

            async def start_profile(self) -> None:
                assert fake.trace is not None

            async def stop_profile(self) -> None:
                assert fake.trace is not None
                folder = Path(fake.started[-1]["profiler_config"]["torch_profiler_dir"])
                shutil.copy(fake.trace, folder / "rank0.json.gz")

            def shutdown(self) -> None:
                fake.stopped += 1

        def save_file(tensors: dict[str, Any], path: str) -> None:
            fake.adapters[Path(path).parent.name] = dict(tensors)

        modules["vllm.v1.engine.async_llm"].AsyncLLM = AsyncLLM  # type: ignore[attr-defined]
        modules["vllm.lora.request"].LoRARequest = lambda *given: given  # type: ignore[attr-defined]
        modules["safetensors.numpy"].save_file = save_file  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
