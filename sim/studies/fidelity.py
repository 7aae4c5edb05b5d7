"""The accuracy page: ``python -m sim.studies.fidelity FOLDER... --out docs/fidelity.md``.

Every record under the FOLDERs is predicted from its inputs alone. Rows that a fit has seen and rows that none has
seen are never averaged together, nor are whole-model runs and lone kernels. The page holds no date and no path, so
equal records and an equal profile give equal bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hardware.profile import Profile, load_profile
from sim.output.files import write_atomically
from sim.studies.command import exit_code
from sim.studies.fidelity_bars import PUBLISHED, bars_section
from sim.studies.fidelity_sections import (
    fitted_section,
    head_section,
    held_section,
    kernels_section,
    misses_section,
    once,
    overlap_section,
    silent_section,
    weak_section,
    whole_section,
)
from sim.studies.fidelity_sharing import sharing_section
from sim.validation.records import RecordError
from sim.validation.validate import Row, validate

GPU = "h100-sxm-80gb"
# Kinds that run a whole model; the others run a kernel or two.
WHOLE = frozenset({"model_step", "generate", "ring_attention", "dit_step"})

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
- Where HBM and tensor cores bound a product alike (256 rows of n 28672, k 8192: streaming takes 175 us, multiplying
  190), how far the two add up is one exponent for all products: time there follows the clock 1.2 % too little between
  two clocks (duty.jsonl). An exponent of its own for this shape would be a fit to one pair of rows;
  `tests/test_hardware_fit.py` keeps the miss.
- 107 pJ a byte of HBM while decoding, whatever the clock, is the H100's; an H100 NVL and an H20 are priced alike and
  have no row. Keys and values pass through L2, whose rate is that of products at the clock, so that their 400 W hold
  at 391 and 634 MHz.
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
        head_section(rows, profile, digests),
        *whole_section(whole),
        bars_section(rows, published),
        *overlap_section(fresh),
        *held_section(held),
        *kernels_section(kernels),
        *sharing_section(fresh, profile),
        *misses_section(whole, kernels),
        *fitted_section(fitted),
        CHOSEN_IN_VIEW,
        *weak_section(profile),
        *silent_section(rows),
    ]
    return "\n\n".join(parts) + "\n"


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
        text = page(once(validate(paths)), profile, digests, held, published)
        write_atomically(arguments.out, text.encode())

    return exit_code("fidelity", write)


if __name__ == "__main__":
    sys.exit(main())
