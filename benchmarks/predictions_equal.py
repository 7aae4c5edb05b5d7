"""Are all predictions what they were? ``python benchmarks/predictions_equal.py write FILE``, then ``compare OLD NEW``.

``write`` predicts every row of the records in the repository and, where WATTLINE_SHARED names them, of the shared
measurements, and runs some scenarios at every detail; one JSON line each. ``--only TEXT`` keeps the files whose path
has TEXT in it. ``compare`` says, by file, how many figures differ by more than 1e-6 and by how much the worst one does.
Rows are known by what they hold, not by their line: files gain and lose rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RELATIVE_TOLERANCE = 1e-6
BIG = {"model": "llama3-70b", "gpu": "h100-sxm-80gb"}
SCENARIOS: dict[str, dict[str, Any]] = {
    "README": {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "seq_len": 512, "layers": 2},
    "demo": BIG | {"tp": 4, "batch": 2, "seq_len": 4096},
    "decode TP4": BIG | {"tp": 4, "phase": "decode", "batch": 8, "seq_len": 2048},
    "chunks": BIG | {"tp": 4, "sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8, "layers": 6},
    "copy engines": BIG
    | {"tp": 4, "sequence_parallel": True, "overlap": "ring_exchange", "overlap_chunks": 4, "layers": 4},
    "two batches": BIG | {"tp": 2, "batch": 2, "overlap": "two_batch", "layers": 4, "lm_head": False},
    "EP2": {"model": "qwen3-30b-a3b", "gpu": "h100-sxm-80gb", "ep": 2, "ep_mode": "all_to_all", "layers": 6},
    "uneven": {"model": "qwen3-30b-a3b", "ep": 4, "ep_mode": "all_reduce", "expert_skew": 0.8, "layers": 4},
    "pipeline": BIG | {"tp": 2, "pp": 2, "batch": 4, "layers": 8},
    "generate": {"model": "llama3-8b", "phase": "generate", "batch": 4, "seq_len": 512, "output_len": 6},
    "eager": {"model": "llama3-8b", "launch": "eager", "phase": "decode", "seq_len": 512, "layers": 8},
    "cold": {"model": "llama3-8b", "regime": "cold", "batch": 4, "seq_len": 4096},
    "ring": {"model": "llama3-8b", "cp": 4, "cp_mode": "ring", "seq_len": 8192, "layers": 4},
}


class Pair(NamedTuple):
    """A figure before and after: how far it is apart, as a share, and which one."""

    apart: float
    group: str
    text: str


def predicted(only: str) -> Iterator[dict[str, Any]]:
    """Every row and scenario with its latency (s) and energy (J), or why there is none."""
    sys.path.insert(0, str(ROOT))
    from sim import simulate
    from sim.errors import SimError
    from sim.validation.validate import validate

    places = [(ROOT / "records", "records")]
    if "WATTLINE_SHARED" in os.environ:
        places.append((Path(os.environ["WATTLINE_SHARED"]) / "measurements", "measurements"))
    for place, name in places:
        for path in sorted(place.rglob("*.jsonl")):
            if only not in str(path):
                continue
            seen: Counter[str] = Counter()  # rows measured twice alike
            for row in validate([path]):
                one, digest = row.predicted, row.record.digest
                seen[digest] += 1
                yield {
                    "what": f"{name}/{path.relative_to(place)}:{digest}.{seen[digest]}",
                    "latency_s": one and one.latency_s,
                    "energy_j": one and one.energy_j,
                    "beside_s": one and one.beside_s,
                    "power_w": one and one.power_w,
                    "skipped": row.skipped,
                }
    for name, fields in SCENARIOS.items() if only in "scenarios" else ():
        for detail in ("auto", "segment", "folded", "full"):
            try:
                run = simulate(**fields, detail=detail)
                figures = {"latency_s": run.latency_s, "energy_j": run.energy_j, "skipped": None}
            except SimError as error:
                figures = {"latency_s": None, "energy_j": None, "skipped": type(error).__name__}
            yield {"what": f"scenario {name}, {detail}", **figures}


def pairs(old: Path, new: Path) -> Iterator[Pair]:
    """The figures of what both files predict; one that only one of them has is infinitely far apart."""
    after = {row["what"]: row for row in map(json.loads, new.read_text().splitlines())}
    for before in map(json.loads, old.read_text().splitlines()):
        now = after.get(before["what"])
        if now is None:
            continue
        group = before["what"].partition(":")[0].partition(",")[0]
        for name in ("latency_s", "energy_j", "beside_s"):
            was, is_ = before.get(name), now.get(name)
            apart = abs(is_ / was - 1.0) if was and is_ else 0.0 if was == is_ else float("inf")
            yield Pair(apart, group, f"{before['what']}: {name} {was} -> {is_} ({now.get('skipped')})")


def compare(old: Path, new: Path) -> int:
    """Print what is apart; the exit status."""
    found = sorted(pairs(old, new), reverse=True)
    far = [pair for pair in found if pair.apart > RELATIVE_TOLERANCE]
    before, after = ({json.loads(line)["what"] for line in path.read_text().splitlines()} for path in (old, new))
    print(
        f"{len(found)} figures, {len(far)} apart by more than {RELATIVE_TOLERANCE:g}, the worst by {found[0].apart:.3g}"
    )
    print(f"only in {old}: {len(before - after)} rows; only in {new}: {len(after - before)}")
    for group, count in Counter(pair.group for pair in far).most_common():
        worst = max(pair.apart for pair in far if pair.group == group)
        print(f"{count:6} {worst:9.3g}  {group}")
    print("\n".join(pair.text for pair in far[:40] or found[:1]))
    return 1 if far else 0


def main() -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("file", type=Path)
    write.add_argument("--only", default="", metavar="TEXT")
    two = commands.add_parser("compare")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        with arguments.file.open("w") as out:
            out.writelines(json.dumps(row) + "\n" for row in predicted(arguments.only))
        return 0
    return compare(arguments.old, arguments.new)


if __name__ == "__main__":
    sys.exit(main())
