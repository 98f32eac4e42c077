"""What earlier runs left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safelaunch.checks.base import ERROR, WARNING, Check, duration, number
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from safelaunch.facts import Cluster
    from safelaunch.plan import Node

_SHOWN = 3


def leftover(cluster: Cluster) -> Iterator[Finding]:
    """Report ranks of dead runs, and other ranks of this user that nobody here knows."""
    nodes = {node.name: node for node in cluster.plan.nodes}
    for host, facts in cluster.nodes.items():
        rows: Sequence[Mapping[str, Any]] = facts["processes"]
        for ours in (True, False):
            group = [row for row in rows if bool(row["run_id"]) is ours]
            if group:
                yield _finding(cluster, nodes[host], group, _port_holder(cluster, host), ours=ours)


def _finding(
    cluster: Cluster, node: Node, rows: Sequence[Mapping[str, Any]], port_holder: int | None, *, ours: bool
) -> Finding:
    held = ["the master port"] if any(row["pid"] == port_holder for row in rows) else []
    devices = sorted({device for row in rows for device in _devices(row)} & set(node.slots))
    if devices:
        held.append(f"GPU {', '.join(map(str, devices))}")
    whose = "of a run that nobody looks after" if ours else "like a rank of another job of yours"
    shown = "; ".join(_describe(row) for row in rows[:_SHOWN])
    more = f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    count = f"{number(len(rows), 'process', 'processes')} {whose}"
    pids = " ".join(str(row["pid"]) for row in rows)
    hostfile = f" --hostfile {cluster.plan.hostfile}" if cluster.plan.hostfile else ""
    return Finding(
        code="process.leftover",
        severity=ERROR if held else WARNING,
        hosts=(node.name,),
        observed=f"{count}{', holding ' + ' and '.join(held) if held else ''}: {shown}{more}",
        why="What is left of an old job holds memory, ports and GPUs, and may answer instead of the new one.",
        fix=f"safelaunch clean{hostfile}" if ours else f"if it is no longer wanted, on the node: kill {pids}",
    )


def _describe(row: Mapping[str, Any]) -> str:
    rank = f" (rank {row['rank']})" if row["rank"] else ""
    run = f" of {row['run_id']}" if row["run_id"] else ""
    return f"pid {row['pid']}{rank}{run}, {duration(row['seconds'])} old: {row['command']}"


def _devices(row: Mapping[str, Any]) -> set[int]:
    """Return the GPUs that a process has open and uses: NVML opens all, CUDA only the visible ones."""
    opened = set(row["gpus"])
    visible = [part.strip() for part in (row["visible"] or "").split(",")]
    numbers = {int(part) for part in visible if part.isdigit()}
    return opened & numbers if numbers else opened


def _port_holder(cluster: Cluster, host: str) -> int | None:
    master = cluster.master
    if master is None or master.host != host:
        return None
    holder = master.facts.get("port", {}).get("holder")
    pid: int | None = holder["pid"] if holder else None
    return pid


CHECKS = (Check(("process.leftover",), leftover, facts=("processes",)),)
