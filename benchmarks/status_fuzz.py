"""Random scenarios: each is refused in one line, or its status is no better than what was measured.

``python -m benchmarks.status_fuzz [--count 2000] [--seed 0]`` prints what became of them; exit 1 where one is silent.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.status_kit import fuzzed


def main() -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status_fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = fuzzed(arguments.count, arguments.seed)
    for status, count in Counter(one.status or "refused" for one in found).most_common():
        print(f"{status:14s} {count:6,}")
    faults = [one for one in found if one.fault is not None]
    for one in faults[:20]:
        print(f"{one.fault}: {one.fields}")
    print(f"{len(faults)} silent of {len(found):,}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
