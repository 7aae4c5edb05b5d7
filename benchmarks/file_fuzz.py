"""Mutated files of all kinds end in a result or one line: ``python -m benchmarks.file_fuzz [COUNT] [SEED] [KIND]``.

Each file goes through the command that reads it. Right is exit code 0, or 2 and one line of at most 300 characters on
stderr; nothing raw reaches the terminal, no file takes longer than a few seconds or more memory than a few hundred MB.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from benchmarks import fuzz_cases, fuzz_files
from sim.cli import main as wattline

KINDS = fuzz_cases.KINDS | fuzz_files.KINDS
LIMIT_S = 60  # on a loaded machine
LIMIT_MIB = 1500  # of the whole process, whatever went before
LINE_CHARACTERS = 300


def end_of(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            wattline(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except _TooLongError:
            err.write(f"longer than {LIMIT_S} s")
            code = 1
        except Exception:
            traceback.print_exc(file=err)
            code = 1
    return code, out.getvalue(), err.getvalue()


def fault_of(code: int, out: str, err: str) -> str | None:
    """What is wrong about how a command ended; None where it ended as it should."""
    if any(not c.isprintable() and c != "\n" for c in out + err):
        return "raw control characters"
    if code == 0:
        return None if not err else f"words on stderr: {err[-300:]}"
    if code != 2:
        return f"exit {code}: {err[-1500:]}"
    if err.count("\n") != 1 or len(err) > LINE_CHARACTERS + 1:
        return f"no line of at most {LINE_CHARACTERS} characters: {err[:400]!r}"
    return None


def run_one(kind: str, seed: int, number: int, folder: Path) -> tuple[int, str | None]:
    """Exit code of one case, and its fault."""
    rng = random.Random(f"{kind} {seed} {number}")
    data, ending, arguments = KINDS[kind](rng)
    path = folder / f"{kind}{seed}_{number}{ending}"  # names are cached
    out = folder / f"{number}.csv"
    if kind == "journal":
        path = folder / f"{number}.csv.journal"
        grid = folder / "grid.json"
        grid.write_text(
            json.dumps({"base": {"model": "llama3-8b", "layers": 1, "regime": "cold"}, "grid": {"batch": [1]}})
        )
        arguments = ["sweep", str(grid), "--jobs", "1", "--quiet"]
    if arguments[0] == "sweep":
        arguments = [*arguments, "--out", str(out)]
    if "TRACE" in arguments:
        trace = folder / "trace.json"
        event = {"ph": "X", "cat": "kernel", "name": "nvjet_rms_norm", "pid": 0, "tid": 7, "ts": 1, "dur": 5}
        trace.write_text(json.dumps({"traceEvents": [event]}))
        arguments = [str(trace) if one == "TRACE" else one for one in arguments]
    path.write_bytes(data)
    code, said, err = end_of([one.replace("@", str(path)) for one in arguments])
    fault = fault_of(code, said, err)
    if fault is None:
        path.unlink(missing_ok=True)
    out.unlink(missing_ok=True)
    return code, fault


class _TooLongError(BaseException):
    """No error of the product's: it must not end in one line of its own."""


def _too_long(*_: object) -> None:
    raise _TooLongError


def main() -> None:
    """Run as a script: counts and faults of each kind; exit 1 where there are faults."""
    words = sys.argv[1:]
    count, seed = int(words[0]) if words else 200, int(words[1]) if len(words) > 1 else 0
    folder = Path(tempfile.mkdtemp(prefix="file_fuzz_"))
    signal.signal(signal.SIGALRM, _too_long)
    bad = 0
    for kind in words[2:] or KINDS:
        ends: Counter[str] = Counter()
        begin = time.perf_counter()
        slowest = 0.0
        for number in range(count):
            one = time.perf_counter()
            signal.alarm(LIMIT_S)
            code, fault = run_one(kind, seed, number, folder)
            signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - one)
            ends[f"exit {code}"] += 1
            if fault is not None:
                ends["faults"] += 1
                print(f"{kind} {seed} {number}: {fault}", flush=True)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        told = f"{time.perf_counter() - begin:.0f} s, slowest {slowest:.1f} s, peak {peak_mib} MiB"
        print(f"{kind}: {count} files, seed {seed}: {dict(sorted(ends.items()))}, {told}", flush=True)
        bad += ends["faults"] + (peak_mib > LIMIT_MIB)
    print(f"faulty files are kept in {folder}" if bad else "no faults")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
