"""Run a plan on this machine's GPUs and append records: ``python -m hardware.calibrate.suite.run``."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware.calibrate.suite.plan import PlannedRow, done_already, estimated_s, load
from hardware.calibrate.suite.plans import least_world, planned
from hardware.calibrate.suite.worker import SuiteOptions, work
from hardware.errors import HardwareError


def run_plan(name: str, options: SuiteOptions, *, only: Sequence[str] = (), share: tuple[int, int] = (0, 1)) -> int:
    """Measure what plan ``name`` asks and ``options.out`` lacks; returns how many rows that gained.

    ``only`` keeps rows of these kinds; ``share`` (i, n) every n-th of the plan's rows from the i-th on, so that n
    machines or GPUs can divide a plan.
    """
    rows = planned(name, world=options.world)[share[0] :: share[1]]
    return run_rows(rows, options, label=f"plan {name}", only=only)


def visible_gpus() -> int:
    """How many GPUs PyTorch sees; an error with the remedy where PyTorch is missing."""
    try:
        import torch
    except ImportError:
        raise HardwareError("measuring needs PyTorch: pip install 'wattline[measure]'") from None
    return int(torch.cuda.device_count())


def run_rows(rows: Sequence[PlannedRow], options: SuiteOptions, *, label: str, only: Sequence[str] = ()) -> int:
    """Measure those of ``rows`` that ``options.out`` lacks; returns how many it gained."""
    out, world = options.out, options.world
    seen = visible_gpus()
    if not options.dry and seen < world:
        raise HardwareError(f"{label} on world = {world} GPUs: {seen} seen by PyTorch")
    before = load(out)
    rows = pending(rows, before, only)
    print(
        f"{label}, {world} GPU(s): {len(rows)} rows to measure, about "
        f"{sum(estimated_s(row) for row in rows):.0f} s; {len(before)} records in {out}",
        file=sys.stderr,
        flush=True,
    )
    if not rows:
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    import torch

    options = replace(options, port=free_port())
    if world == 1 or options.dry:
        work(0, rows, options)
    else:
        # NVLink multicast stays off unless the user says otherwise: records are taken without it.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.multiprocessing.spawn(work, args=(rows, options), nprocs=world, join=True)
    return len(load(out)) - len(before)


def pending(
    rows: Sequence[PlannedRow], records: Sequence[dict[str, Any]], only: Sequence[str] = ()
) -> list[PlannedRow]:
    """The rows that no record holds yet, of the kinds asked for.

    >>> pending([{"kind": "copy", "bytes_moved": 4}, {"kind": "idle"}], [], only=["idle"])
    [{'kind': 'idle'}]
    """
    kinds = {row["kind"] for row in rows}
    for kind in only:
        if kind not in kinds:
            raise HardwareError(f"--only {kind}: the plan has {', '.join(sorted(kinds))}")
    return [row for row in rows if (not only or row["kind"] in only) and not done_already(row, records)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see ``--help``."""
    parser = argparse.ArgumentParser(description="Measure a plan on this machine's GPUs; resumable.")
    parser.add_argument("--plan", required=True, help="smoke, calibrate, calibrate_multi, ... or a file of records")
    parser.add_argument("--out", type=Path, required=True, help="records, one JSON object a line; appended to")
    parser.add_argument("--world", type=int, help="number of GPUs (default: the plan's least)")
    parser.add_argument("--only", default="", help="kinds to measure, separated by commas")
    parser.add_argument("--share", type=share_of, default=(0, 1), help="i/n: every n-th row from the i-th on")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="stop before this many seconds")
    parser.add_argument("--traces", type=Path, help="folder for profiler traces of whole-model steps")
    parser.add_argument("--gpu", help="id to write into records (default: from the product name)")
    parser.add_argument("--dry-run", action="store_true", help="check every row without a GPU; figures are fake")
    parser.add_argument("--list", action="store_true", help="print the rows still to measure and stop")
    args = parser.parse_args(argv)
    only = [kind for kind in args.only.split(",") if kind]
    try:
        if args.list:
            rows = pending(planned(args.plan, world=args.world or 2), load(args.out), only)
            for row in rows:
                print(json.dumps(row))
            print(f"{len(rows)} rows, about {sum(map(estimated_s, rows)):.0f} s", file=sys.stderr)
            return 0
        options = SuiteOptions(
            out=args.out,
            world=args.world or least_world(args.plan),
            gpu_id=args.gpu,
            dry=args.dry_run,
            budget_s=args.budget_s,
            traces=args.traces,
        )
        gained = run_plan(args.plan, options, only=only, share=args.share)
    except HardwareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{gained} records added to {args.out}")
    return 0


def share_of(text: str) -> tuple[int, int]:
    """Which part of how many.

    >>> share_of("1/4")
    (1, 4)
    """
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"'{text}': give i/n with i below n, as 0/4")
    return int(part), int(parts)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
