"""What a server does with the logits of a step."""

from __future__ import annotations

from typing import Any

from hardware.calibrate.suite.case import Case
from hardware.calibrate.suite.timing import Bench
from hardware.errors import HardwareError


def sampling_case(bench: Bench, how: str, rows: int, width: int) -> Case:
    """Logits to tokens as servers do it in PyTorch; a draw is the largest of p over exponential noise."""
    torch, logits = bench.torch, bench.randn(rows, width)
    noise = torch.empty(rows, width, device=bench.device, dtype=torch.float32)

    def drawn(scores: Any) -> object:
        noise.exponential_()
        return scores.softmax(dim=-1).div_(noise).argmax(dim=-1)

    def top_p_of(scores: Any) -> Any:
        """Scores with the tail beyond 0.9 of the probability taken out."""
        ranked, place = scores.sort(dim=-1)
        tail = ranked.softmax(dim=-1).cumsum(dim=-1) <= 0.1
        tail[:, -1] = False
        return ranked.masked_fill_(tail, float("-inf")).scatter(dim=-1, index=place, src=ranked)

    def launch(_: int) -> object:
        scores = logits.to(torch.float32)
        match how:
            case "greedy":
                return scores.argmax(dim=-1)
            case "random":
                return drawn(scores.div_(0.6))
            case "top_p":
                return drawn(top_p_of(scores.div_(0.6)))
        raise HardwareError(f"how = '{how}': the suite samples greedy, random or top_p")

    return Case(launch=launch, kernels_each=16)
