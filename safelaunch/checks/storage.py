"""Whether there is room: shared memory, and the disks that ranks write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safelaunch.checks.base import ERROR, GIB, MIB, NOT_CHECKED, WARNING, Check, number, size
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safelaunch.facts import Cluster

SHM_ERROR, SHM_WARNING, SHM_PER_RANK = 64 * MIB, GIB, 64 * MIB
"""Docker's default of 64 MiB is known to fail; NCCL's manual asks for 1 GiB (`--shm-size=1g`)."""
DISK_ERROR, DISK_WARNING = GIB, 10 * GIB
"""Our judgement: compiled extensions and logs need a GiB, a checkpoint mostly more than ten."""


def shm_small(cluster: Cluster) -> Iterator[Finding]:
    """Report a /dev/shm that is too small for the local ranks."""
    ranks = {node.name: len(node.slots) for node in cluster.plan.nodes}
    for host, node in cluster.nodes.items():
        free, total = node["shm"]["free"], node["shm"]["total"]
        if free >= max(SHM_WARNING, SHM_PER_RANK * ranks[host]):
            continue
        fatal = free <= SHM_ERROR and ranks[host] > 1
        yield Finding(
            code="shm.small",
            severity=ERROR if fatal else WARNING,
            hosts=(host,),
            observed=f"{size(free)} of {size(total)} free in /dev/shm, for {number(ranks[host], 'rank')}",
            why="Ranks of a node and workers of data loaders exchange data there; without room they die of a"
            " bus error, or NCCL of 'unhandled system error'.",
            fix="on the node: sudo mount -o remount,size=16g /dev/shm   # container: --shm-size=16g",
        )


def storage_full(cluster: Cluster) -> Iterator[Finding]:
    """Report file systems without room; places on the same one are named together."""
    for host, node in cluster.nodes.items():
        systems: dict[int, list[Mapping[str, Any]]] = {}
        for row in node["storage"]:
            if "error" in row:
                yield Finding(
                    code="storage.full",
                    severity=NOT_CHECKED,
                    hosts=(host,),
                    observed=f"could not look at {row['path']} ({row['use']}): {row['error']}",
                    why="A disk or network file system that does not answer will stop the ranks too.",
                    fix=f"on the node: timeout 10 df -h {row['path']}",
                )
            elif row["total"]:  # some virtual file systems have no size
                systems.setdefault(row["device"], []).append(row)
        for rows in systems.values():
            free, total = rows[0]["free"], rows[0]["total"]
            if free >= DISK_WARNING:
                continue
            uses = ", ".join(dict.fromkeys(f"{row['use']} in {row['path']}" for row in rows))
            yield Finding(
                code="storage.full",
                severity=ERROR if free < DISK_ERROR else WARNING,
                hosts=(host,),
                observed=f"{size(free)} free of {size(total)} for {uses}",
                why="A full disk stops a checkpoint or a compilation on one node; all others wait for it.",
                fix=f"on the node: df -h {rows[0]['at']}; du -xsh {rows[0]['at']}/* | sort -h | tail",
            )


CHECKS = (
    Check(("shm.small",), shm_small, facts=("shm",)),
    Check(("storage.full",), storage_full, facts=("storage",)),
)
