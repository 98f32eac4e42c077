"""Rows of the benchmark table; commands are compared interleaved, in the same minutes, by medians."""

from __future__ import annotations

import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure; `bound` is the most it may be (None: told, not judged), `peers` what it stands against."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """Return the row as build/bench.json has it."""
        return {**asdict(self), "ok": self.bound is None or self.value <= self.bound}


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run every measure once a round, so that all meet the same load; return medians by name."""
    seen: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seen[name].append(measure())
    return {name: statistics.median(values) for name, values in seen.items()}


def wall(command: Sequence[str], **options: object) -> float:
    """Return the seconds a command takes; it must exit 0."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, **options)
    return time.perf_counter() - started
