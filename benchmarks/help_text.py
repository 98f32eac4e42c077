"""`safelaunch --help` against `deepspeed --help`: how long a user waits for a word."""

from __future__ import annotations

import os
import sys

from timing import Row, interleaved, wall


def measure(rounds: int) -> list[Row]:
    """Return the ratio of both commands' wall time."""
    programs = os.path.dirname(sys.executable)
    medians = interleaved(
        {
            name: lambda name=name: wall([os.path.join(programs, name), "--help"])
            for name in ("safelaunch", "deepspeed")
        },
        rounds,
    )
    ratio = medians["safelaunch"] / medians["deepspeed"]
    peers = {f"{name} (s)": seconds for name, seconds in medians.items()}
    return [
        Row(name="--help: wall, ratio to deepspeed", value=ratio, unit="x", bound=0.2, peers=peers),
        Row(name="--help: wall", value=medians["safelaunch"], unit="s", bound=1 / 3),
    ]
