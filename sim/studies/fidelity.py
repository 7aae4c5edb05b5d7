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
from sim.studies.prose import prose
from sim.validation.records import RecordError
from sim.validation.validate import Row, validate

GPU = "h100-sxm-80gb"
# Kinds that run a whole model; the others run a kernel or two.
WHOLE = frozenset({"model_step", "generate", "ring_attention", "dit_step"})

CHOSEN_IN_VIEW = prose("fidelity", "chosen_in_view")


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
