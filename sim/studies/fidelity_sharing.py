"""The accuracy page on communication beside computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hardware.profile import Profile
from sim.studies.fidelity_tables import table
from sim.validation.validate import Row


def sharing_section(fresh: Sequence[Row], profile: Profile) -> Iterator[str]:
    """Each number of blocks left out of the fit in turn, then rows that no fit has seen."""
    sharing = profile.sharing
    if not sharing.left_out:
        return
    lines = [
        (str(ctas), str(n), f"{100 * a:.1f}", f"{100 * b:.1f}") for ctas, (n, a, b) in sorted(sharing.left_out.items())
    ]
    total = sum(n for n, _, _ in sharing.left_out.values())
    pooled = [sum(row[0] * row[i] for row in sharing.left_out.values()) / total for i in (1, 2)]
    lines.append(("all", str(total), f"{100 * pooled[0]:.1f}", f"{100 * pooled[1]:.1f}"))
    fitted = ", ".join(
        f"{name} {getattr(sharing, name):.3g} +- {error:.2g}" for name, error in sorted(sharing.standard_errors.items())
    )
    yield (
        "## Communication beside computation\n\n"
        f"Seconds of both sides in {sharing.source}. Each number of blocks was left out of the fit in turn and then "
        f"predicted: mean absolute errors in per cent. Fitted on all: {fitted}.\n\n"
        + table(("blocks left out", "n", "computation", "collective"), lines, left=1)
    )
    unseen = [row for row in fresh if row.record.kind == "together"]
    both = [
        [abs(error) for row in unseen if (error := row.error(output)) is not None]
        for output in ("latency_s", "beside_s")
    ]
    if all(both):
        computation, collective = (100 * sum(errors) / len(errors) for errors in both)
        yield (
            f"On {len(unseen)} rows that no fit has seen: computation {computation:.1f} %, collective "
            f"{collective:.1f} %. "
            "GEMMs beside 16 and 32 blocks in contention.jsonl, where several collectives pass during a GEMM, are the "
            "known miss; launched as independent lanes (four.jsonl, 32 blocks) one passes a GEMM, as predicted."
        )
