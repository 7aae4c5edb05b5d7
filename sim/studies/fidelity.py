"""The accuracy page: ``python -m sim.studies.fidelity FOLDER... --out docs/fidelity.md``.

Every record under the FOLDERs is predicted from its inputs alone. Rows that a fit has seen and rows that none has
seen are never averaged together, nor are whole-model runs and lone kernels. The page holds no date and no path, so
equal records and an equal profile give equal bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hardware.profile import Profile, load_profile
from hardware.uncertainty import WEAK_LOG_ERROR
from sim.output.files import write_atomically
from sim.studies.command import exit_code
from sim.studies.fidelity_bars import PUBLISHED, bars_section
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
from sim.studies.fidelity_sharing import sharing_section
from sim.studies.fidelity_tables import error_table, inputs_text, percent, table
from sim.validation.ordering import orderings
from sim.validation.records import RecordError
from sim.validation.validate import Row, validate

GPU = "h100-sxm-80gb"
OUTPUTS = {"latency_s": "latency", "energy_j": "energy"}
# Kinds that run a whole model; the others run a kernel or two.
WHOLE = frozenset({"model_step", "generate", "ring_attention", "dit_step"})
# An unfitted group misses when its mean error is above this, and an unfitted row when its own is.
MISS_GROUP = 0.04
MISS_ROW = 0.05
SHOWN_ROWS = 25

CHOSEN_IN_VIEW = """## Choices made with whole-model rows in view

No coefficient was fitted on whole-model rows, but some choices were made by people who had seen them, so these rows are
weaker evidence for them:

- What communication and computation take from one another used to hang on two constants that an earlier model chose on
  **overlap.jsonl**. They are gone: the section below is fitted on kernel rows. The mechanisms (blocks that start late,
  a grid of whole rounds) were read off profiler traces of chunked overlap.
- That a GEMM wins the SMs when one event releases it and a collective was read off profiler traces of chunked overlap,
  after overlap.jsonl had been seen to come out too fast.
- The pause between eager kernels was taken from a profiler trace after eager rows had been seen to come out too fast.
- The temperature that predictions assume (the median of uncapped kernel rows; 53 C once, now 59) replaced another rule
  (66 C) after decode energies of model_step.jsonl had been seen to come out too high.
- That a grouped GEMM is one of two kernels was looked up in PyTorch's source after rows of mixtures of experts had come
  out 8 % too slow at 187 rows an expert and 8 % too fast at 128; the law was then fitted on kernel rows around
  that change (experts.jsonl).
- That a settled step runs at one clock, that few blocks of a collective follow the clock, that late blocks of a product
  fetch whole tiles, and that a reduce-scatter wins the SMs from the next product (in steps of 4 chunks; in those of 8
  it loses them, which is not modelled), was read off profiler traces of two H200s whose steps had come out 3 to 7 % too
  fast; the on-chip clock of attention comes from duty.jsonl.
- Rows are predicted at the temperature that they recorded, a condition of the room like the power cap: nothing here
  predicts cooling. `wattline validate --typical-temperature` leaves it out; that costs 0.1 to 0.4 points, and 2 points
  in energy where four cool chips (50 C) ran experts.
- The host's pace in eager mode is the least of several runs of one layer's launches on the host, which differed by 1.7
  times; an eager decode row had been seen before that choice."""


def page(
    rows: Sequence[Row],
    profile: Profile,
    digests: Mapping[str, str],
    held: str | None = None,
    published: Path | None = None,
) -> str:
    """The whole page as Markdown.

    ``digests`` holds the SHA-256 of each record file by session and name, ``published`` the speed-ups of striped
    attention.
    """
    fresh = [row for row in rows if not row.fitted and row.predicted is not None]
    fitted = [row for row in rows if row.fitted and row.predicted is not None]
    whole = [row for row in fresh if row.record.kind in WHOLE]
    kernels = [row for row in fresh if row.record.kind not in WHOLE]
    parts = [
        _head(rows, profile, digests),
        *_whole(whole),
        bars_section(rows, published),
        *_overlap(fresh),
        *_held(held),
        *_kernels(kernels),
        *sharing_section(fresh, profile),
        *_misses(whole, kernels),
        *_fitted(fitted),
        CHOSEN_IN_VIEW,
        *_weak(profile),
        *_silent(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _head(rows: Sequence[Row], profile: Profile, digests: Mapping[str, str]) -> str:
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


def _whole(rows: Sequence[Row]) -> Iterator[str]:
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


def _held(printed: str | None) -> Iterator[str]:
    """Kernel rows left out of the fit in turn, as :mod:`hardware.calibrate.crossval` printed them."""
    if printed is not None:
        yield (
            "## Kernel rows left out in turn\n\n"
            "Each group was left out of the fit and predicted from the rest "
            "(`python -m hardware.calibrate.crossval records/h100-sxm-80gb/calibration`).\n\n```\n"
            + f"{printed.rstrip()}\n```"
        )


def _kernels(rows: Sequence[Row]) -> Iterator[str]:
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


def _overlap(rows: Sequence[Row]) -> Iterator[str]:
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


def _misses(whole: Sequence[Row], kernels: Sequence[Row]) -> Iterator[str]:
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


def _fitted(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "## Rows that the profile was fitted on\n\n"
        "How well the laws hold what they were given; **no estimate of the error on anything new**. Collectives are "
        "tables of these very rows, so a bare collective is met by construction; kernel laws carry a bounded learnt "
        "correction, which also leans to the rows it has seen. Figures near zero here say nothing more than that."
    )
    for output, word in OUTPUTS.items():
        yield f"### {word.capitalize()}\n\n" + error_table(group_errors(rows, output))


def _weak(profile: Profile) -> Iterator[str]:
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


def _silent(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.skipped:
            key = (row.record.path.name, row.record.kind, row.skipped)
            reasons[key] = reasons.get(key, 0) + 1
    if reasons:
        yield "## Rows without a prediction\n\n" + table(
            ("file", "kind", "reason", "n"), [(*key, str(count)) for key, count in reasons.items()], left=3
        )


def _once(rows: Sequence[Row]) -> list[Row]:
    """Each record once, however many of the folders hold it."""
    return list({row.record.digest: row for row in reversed(rows)}.values())[::-1]


def record_files(folder: Path) -> list[Path]:
    """The record files under ``folder``, or under its folder ``measurements`` where it has one, sorted by path."""
    inner = folder / "measurements"
    found = sorted((inner if inner.is_dir() else folder).rglob("*.jsonl"))
    if not found:
        raise RecordError(f"no .jsonl files under '{folder}': give a folder of records")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m sim.studies.fidelity", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="the Markdown page to write")
    parser.add_argument("--crossval", type=Path, help="what python -m hardware.calibrate.crossval printed, to include")
    arguments = parser.parse_args(argv)
    profile = load_profile(GPU)
    assert profile is not None, "the package ships this profile"

    def write() -> None:
        paths = [path for folder in arguments.folders for path in record_files(folder)]
        digests = {
            f"{path.resolve().parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
        }
        held = arguments.crossval.read_text(encoding="utf-8") if arguments.crossval else None
        published = next((found for folder in arguments.folders if (found := folder / PUBLISHED).is_file()), None)
        text = page(_once(validate(paths)), profile, digests, held, published)
        write_atomically(arguments.out, text.encode())

    return exit_code("fidelity", write)


if __name__ == "__main__":
    sys.exit(main())
