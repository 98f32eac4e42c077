"""Whether the clocks of the nodes agree."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from safelaunch.checks.base import ERROR, WARNING, Check, duration
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safelaunch.facts import Cluster

ERROR_SECONDS, WARNING_SECONDS = 30.0, 1.0
"""Our judgement: a second muddles logs; half a minute breaks builds, file times and certificates."""


def skew(cluster: Cluster) -> Iterator[Finding]:
    """Compare every clock, ours too, with their median; an offset counts as far as it is certain."""
    clocks = {host: node["clock"] for host, node in cluster.nodes.items()}
    if not clocks:
        return
    middle = median([0.0, *(clock["offset"] for clock in clocks.values())])
    for host, clock in {"": {"offset": 0.0, "uncertainty": 0.0}, **clocks}.items():
        offset = clock["offset"] - middle
        certain = abs(offset) - clock["uncertainty"]
        if certain <= WARNING_SECONDS:
            continue
        who = "its clock" if host else "the clock of this machine"
        way = "ahead of" if offset > 0 else "behind"
        yield Finding(
            code="clock.skew",
            severity=ERROR if host and certain > ERROR_SECONDS else WARNING,
            hosts=(host,) if host else (),
            observed=f"{who} is {duration(abs(offset))} {way} the rest (± {duration(clock['uncertainty'])})",
            why="Logs can't be put in order, and what compares file times or certificates goes wrong.",
            fix=("on the node: " if host else "")
            + "sudo chronyc makestep || sudo systemctl restart systemd-timesyncd",
        )


CHECKS = (Check(("clock.skew",), skew, facts=("clock",)),)
