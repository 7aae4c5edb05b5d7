"""The deployments of a plan as a picture: what a GPU yields over what a user sees, and its front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sim.explore.pareto import front
from sim.explore.picture import picture
from sim.explore.plan.question import Deployment


def write_front(found: Sequence[Deployment], path: Path) -> None:
    """Tokens a second of a user and of a GPU, joules a token as size; the front joined (PNG or SVG by the ending)."""
    points = [(1.0 / candidate.tpot_s, candidate.tokens_per_s_per_gpu) for candidate in found]
    best = sorted(points[i] for i in front([(-user, -gpu) for user, gpu in points]))
    with picture(path, height=5.0) as axis:
        for mode in dict.fromkeys(candidate.mode for candidate in found):
            mine = [(point, one) for point, one in zip(points, found, strict=True) if one.mode == mode]
            axis.scatter([user for (user, _), _ in mine], [gpu for (_, gpu), _ in mine], s=40, label=mode)
            for (user, gpu), one in mine:
                axis.annotate(
                    f"{one.label}\n{one.energy_j_per_token:.2g} J/token", (user, gpu), fontsize=6,
                    xytext=(4, 4), textcoords="offset points",
                )  # fmt: skip
        axis.plot(*zip(*best, strict=True), linewidth=1, color="grey", zorder=0)
        asked = found[0].question
        axis.set(
            xlabel="output tokens/s of a user",
            ylabel="output tokens/s of a GPU",
            title=f"{asked.model} on {asked.gpus} x {asked.gpu}: {asked.input_len} in, {asked.output_len} out",
        )
        axis.margins(0.18)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
