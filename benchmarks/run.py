"""`make bench`: run all benchmarks, print the table, write build/bench.json."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import fanout
import help_text
import hook
import launch

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PARTS = ("help", "launch", "fanout", "hook")


def main() -> int:
    """Return 1 if a figure is over its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command; medians are taken")
    options = parser.parse_args()
    parts = options.parts or PARTS
    rows = []
    directory = tempfile.mkdtemp(prefix="safelaunch-bench-", dir="/var/tmp")
    try:
        if "help" in parts:
            rows += [row.document() for row in help_text.measure(options.rounds)]
        if "launch" in parts:
            rows += [row.document() for row in launch.measure(options.rounds, directory)]
        if "fanout" in parts:
            rows += fanout.measure(rounds=options.rounds)
        if "hook" in parts:
            rows += [row.document() for row in hook.measure(options.rounds, directory)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(os.path.join(REPO, "build"), exist_ok=True)
    with open(os.path.join(REPO, "build", "bench.json"), "w") as stream:
        json.dump(rows, stream, indent=2)
    for row in rows:
        bound = "" if row["bound"] is None else f"<= {row['bound']:.3g}"
        mark = "ok" if row["ok"] else "OVER"
        peers = ", ".join(f"{name} {value:.3g}" for name, value in row["peers"].items())
        print(f"{row['name']:<62} {row['value']:>8.3g} {row['unit']:<8} {bound:<9} {mark:<5} {peers}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
