"""Sections of the accuracy page: words and tables of rows beside their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hardware.profile import Profile
from hardware.uncertainty import WEAK_LOG_ERROR
from sim.studies.fidelity_errors import (
    MIN_ROWS,
    PRIOR_LOG_ERROR,
    RESAMPLES,
    SEED,
    gpus,
    group_errors,
    summarise,
    weakly_identified,
)
from sim.studies.fidelity_tables import error_table, inputs_text, percent, table
from sim.validation.ordering import orderings
from sim.validation.validate import Row

OUTPUTS = {"latency_s": "latency", "energy_j": "energy"}
# An unfitted group misses when its mean error is above this, and an unfitted row when its own is.
MISS_GROUP = 0.04
MISS_ROW = 0.05
SHOWN_ROWS = 25


def head_section(rows: Sequence[Row], profile: Profile, digests: Mapping[str, str]) -> str:
    changed = sorted(name for name, digest in profile.provenance.files.items() if digests.get(name, digest) != digest)
    absent = sorted(name for name in profile.provenance.files if name not in digests)
    text = (
        "# Fidelity\n\n"
        "Written by `python -m sim.studies.fidelity FOLDER... --out docs/fidelity.md`; do not edit.\n\n"
        f"{len(rows)} records of {len(digests)} files were predicted from their inputs alone with the profile "
        f"`{profile.gpu}` ({profile.status}). Errors are predicted over measured minus one, in per cent. *Mean*, "
        "*median* and *worst* are of absolute errors, *bias* is the signed mean. *95 %* is the bootstrap interval of "
        f"the mean over the rows of the group ({RESAMPLES} resamples, percentile method, seed {SEED}; none below "
        f"{MIN_ROWS} rows). It tells how the mean depends on which rows happen to be in the group, and nothing about "
        "other GPUs, hosts or software: rows of a file share those."
    )
    if changed:
        text += f"\n\nFiles that differ from the ones the profile was fitted on: {', '.join(changed)}."
    if absent:
        text += f"\n\nFiles that the profile was fitted on and that were not read: {', '.join(absent)}."
    return text


def whole_section(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "## Whole-model runs, which no fit has seen\n\n"
        "Every kernel, the power cap and the clock have to come out right together. No coefficient was fitted on these "
        "rows (the fitting command refuses them). Some were looked at while the model was built: they are unfitted, "
        "not blind."
    )
    yield "### In short\n\n" + _pooled(rows)
    for output, word in OUTPUTS.items():
        yield f"### {word.capitalize()}\n\n" + error_table(group_errors(rows, output))
    yield "What these rows cover, and so what is checked at all: " + _coverage(rows) + "."


def _pooled(rows: Sequence[Row]) -> str:
    """All rows of a file with the same number of GPUs as one group."""
    members: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        members.setdefault((row.record.path.name, int(row.record.inputs.get("world", 1))), []).append(row)
    lines = []
    for (file, world), part in members.items():
        for output, word in OUTPUTS.items():
            signed = [error for row in part if (error := row.error(output)) is not None]
            if signed:
                lines.append(summarise(file, f"{gpus(world)}, {word}", signed))
    return error_table(lines)


def held_section(printed: str | None) -> Iterator[str]:
    """Kernel rows left out of the fit in turn, as :mod:`hardware.calibrate.crossval` printed them."""
    if printed is not None:
        yield (
            "## Kernel rows left out in turn\n\n"
            "Each group was left out of the fit and predicted from the rest "
            "(`python -m hardware.calibrate.crossval records/h100-sxm-80gb/calibration`).\n\n```\n"
            + f"{printed.rstrip()}\n```"
        )


def kernels_section(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield (
        "## Kernels that no fit has seen\n\n"
        "Lone kernels, collectives and bursts, many at sizes chosen to lie between or beyond those of the fit: the "
        "harder test of each law. Short kernels count as much as long ones here, and little in a model."
    )
    for output, word in OUTPUTS.items():
        yield f"### {word.capitalize()}\n\n" + error_table(group_errors(rows, output))


def _coverage(rows: Sequence[Row]) -> str:
    names = {"gpu": "GPU", "world": "GPUs in a run", "model": "models", "phase": "phases", "dtype": "data types"}
    parts = []
    for field, word in names.items():
        values = {row.record.inputs[field] for row in rows if row.record.inputs.get(field) is not None}
        if values:
            parts.append(f"{word} {', '.join(str(value) for value in sorted(values))}")
    for field, word in (("batch", "batch"), ("seq_len", "tokens"), ("layers", "layers run")):
        values = {row.record.inputs[field] for row in rows if row.record.inputs.get(field) is not None}
        if values:
            parts.append(f"{word} {min(values)} to {max(values)}")
    return "; ".join(parts) if parts else "nothing"


def overlap_section(rows: Sequence[Row]) -> Iterator[str]:
    found = orderings(rows)
    if not found:
        return
    lines = [
        (
            ", ".join(f"{name}={value}" for name, value in group.group.items()),
            OUTPUTS[group.output],
            f"{group.pairs_right} of {group.pairs}",
            f"{100 * group.choice_excess:.1f}",
            f"{group.chunk_right} of {group.chunk_cases}",
            f"{group.one_chunk_right} of {group.chunk_cases}",
            f"{group.most_chunks_right} of {group.chunk_cases}",
        )
        for group in found
    ]
    head = ("group", "output", "pairs in order", "choice above best %", "chunks right", "always one", "always most")
    yield (
        "## Does it choose the right overlap?\n\n"
        "Rows that differ only in chunks and in blocks for communication. *Pairs in order* counts pairs whose "
        "measurements differ by more than 3 %. *Chunks right*: for a given number of blocks, the predicted best chunk "
        "count measures within 1 % of the best; beside it two habits that need no simulator.\n\n"
        + table(head, lines, left=2)
    )


def misses_section(whole: Sequence[Row], kernels: Sequence[Row]) -> Iterator[str]:
    yield (
        f"## Misses\n\nUnfitted groups with a mean error above {100 * MISS_GROUP:g} %, and the unfitted rows that are "
        f"furthest off (more than {100 * MISS_ROW:g} %, at most {SHOWN_ROWS}, the furthest first)."
    )
    for word, rows in (("Whole-model runs", whole), ("Kernels", kernels)):
        if rows:
            yield f"### {word}\n\n" + _groups_off(rows)
            yield _rows_off(rows)


def _groups_off(rows: Sequence[Row]) -> str:
    lines = [
        (group.file, group.group, word, str(group.n), percent(group.mean), percent(group.bias))
        for output, word in OUTPUTS.items()
        for group in group_errors(rows, output)
        if group.mean > MISS_GROUP
    ]
    return table(("file", "group", "output", "n", "mean", "bias"), lines, left=3) if lines else "No group."


def _rows_off(rows: Sequence[Row]) -> str:
    far = [(max(abs(row.error(output) or 0.0) for output in OUTPUTS), row) for row in rows]
    worst = sorted((item for item in far if item[0] > MISS_ROW), key=lambda item: -item[0])
    text = f"{len(worst)} of {len(rows)} rows are more than {100 * MISS_ROW:g} % off in latency or energy"
    if not worst:
        return text + "."
    lines = [
        (
            f"{row.record.path.name}:{row.record.line}",
            percent(row.error("latency_s")),
            percent(row.error("energy_j")),
            inputs_text(row),
        )
        for _, row in worst[:SHOWN_ROWS]
    ]
    return f"{text}:\n\n" + table(("row", "latency", "energy", "inputs"), lines, left=1, text_last=True)


def fitted_section(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "## Rows that the profile was fitted on\n\n"
        "How well the laws hold what they were given; **no estimate of the error on anything new**. Collectives are "
        "tables of these very rows, so a bare collective is met by construction; kernel laws carry a bounded learnt "
        "correction, which also leans to the rows it has seen. Figures near zero here say nothing more than that."
    )
    for output, word in OUTPUTS.items():
        yield f"### {word.capitalize()}\n\n" + error_table(group_errors(rows, output))


def weak_section(profile: Profile) -> Iterator[str]:
    weak = weakly_identified(profile)
    total = len(profile.provenance.standard_errors)
    text = (
        "## What is weakly identified\n\n"
        f"{len(weak)} of {total} fitted coefficients have a standard error above {WEAK_LOG_ERROR:g} in the logarithm: "
        "the records fix some sum or product that they enter, not the coefficient itself. Every logarithm was pulled "
        f"to its start with a standard deviation of {PRIOR_LOG_ERROR:g}, so an error near or above {PRIOR_LOG_ERROR:g} "
        "means that the records say next to nothing about it. Do not read these as physics, and do not trust a "
        "forecast for another GPU that hangs on one of them."
    )
    if weak:
        lines = [(f"`{name}`", f"{error:.2f}") for name, error in weak]
        text += "\n\n" + table(("coefficient", "standard error of the logarithm"), lines, left=1)
    yield text


def silent_section(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.skipped:
            key = (row.record.path.name, row.record.kind, row.skipped)
            reasons[key] = reasons.get(key, 0) + 1
    if reasons:
        yield "## Rows without a prediction\n\n" + table(
            ("file", "kind", "reason", "n"), [(*key, str(count)) for key, count in reasons.items()], left=3
        )


def once(rows: Sequence[Row]) -> list[Row]:
    """Each record once, however many of the folders hold it."""
    return list({row.record.digest: row for row in reversed(rows)}.values())[::-1]
