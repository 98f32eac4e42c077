"""Whether every name in the hostfile is a machine of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safelaunch.checks.base import ERROR, Check, fold, groups
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safelaunch.facts import Cluster, NodeFacts


def alias(cluster: Cluster) -> Iterator[Finding]:
    """Report names that lead to one machine."""
    nodes = {node.name: node for node in cluster.plan.nodes}
    for hosts in _machines(cluster):
        if len(hosts) < 2:
            continue
        facts = [cluster.nodes[host] for host in hosts]
        shared = {
            "boot id": {node["host"]["boot_id"] for node in facts},
            "machine id": {node["host"]["machine_id"] for node in facts},
            "SSH host key": {node.host_key for node in facts},
            "address": {node.address or None for node in facts},
        }
        same = [name for name, values in shared.items() if len(values) == 1 and None not in values]
        yield Finding(
            code="hostfile.alias",
            severity=ERROR,
            hosts=hosts,
            where=nodes[hosts[1]].where,
            observed=f"{fold(hosts)} are one machine: the same {', '.join(same)}",
            why="Its devices would be used twice, and the ranks would fight for ports.",
            fix=f"in {cluster.plan.hostfile or 'the hostfile'}: leave out {', '.join(hosts[1:])}",
        )


def duplicate(cluster: Cluster) -> Iterator[Finding]:
    """Report machines that are not one, yet call themselves by one id."""
    first = {hosts[0]: cluster.nodes[hosts[0]] for hosts in _machines(cluster)}
    for fact, name, fix in (
        ("boot_id", "boot id", "on all but one of them: sudo reboot"),
        (
            "machine_id",
            "machine id",
            "on all but one of them: sudo rm /etc/machine-id && sudo systemd-machine-id-setup",
        ),
    ):
        for value, hosts in groups({host: node["host"][fact] for host, node in first.items()}):
            keys = {first[host].host_key for host in hosts}
            # Machines that boot one image over the network share a key and a machine id, and do no harm.
            if value is None or len(hosts) < 2 or (fact == "machine_id" and len(keys) == 1):
                continue
            yield Finding(
                code="identity.duplicate",
                severity=ERROR,
                hosts=hosts,
                observed=f"{fold(hosts)} have the same {name} {value}, but are not one machine",
                why="They are clones, or containers of one machine. NCCL takes ranks of one boot id and host"
                " name for neighbours in one memory and waits for ever; other tools mix up machines by id.",
                fix=fix,
            )


def _machines(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the hosts that lead to one machine together, each other host alone."""
    machines: list[list[str]] = []
    for host, node in cluster.nodes.items():
        for machine in machines:
            if _same(node, cluster.nodes[machine[0]]):
                machine.append(host)
                break
        else:
            machines.append([host])
    return [tuple(machine) for machine in machines]


def _same(one: NodeFacts, other: NodeFacts) -> bool:
    boots = (one["host"]["boot_id"], other["host"]["boot_id"])
    if None not in boots and boots[0] != boots[1]:
        return False  # the kernel makes a new one at each start: different machines behind one gateway or key
    if one.address and one.address == other.address:
        return True
    if one.host_key and other.host_key:
        return one.host_key == other.host_key
    return None not in boots and one["host"]["machine_id"] == other["host"]["machine_id"]


CHECKS = (
    Check(("hostfile.alias",), alias, facts=("host",)),
    Check(("identity.duplicate",), duplicate, facts=("host",)),
)
