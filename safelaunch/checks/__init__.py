"""The check engine: every check over the whole cluster's facts, in an order where causes come first.

A check is one function in the file of its subject and one line in that file's CHECKS.
"""

from __future__ import annotations

from dataclasses import replace
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

from safelaunch.checks import clock, code, gpus, hosts, network, paths, processes, reach, software, storage
from safelaunch.checks.base import NOT_CHECKED, Check, fold
from safelaunch.findings import Finding, Severity, override

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from safelaunch.facts import Cluster

__all__ = ["CHECKS", "Check", "fold", "merge", "run"]

CHECKS: tuple[Check, ...] = tuple(
    check
    for subject in (reach, hosts, paths, code, software, gpus, network, clock, processes, storage)
    for check in subject.CHECKS
)
_STUCK = (
    "ps -eo pid,stat,wchan:30,cmd | awk '$2 ~ /D/'   # what waits in the kernel there, for a disk or a driver"
)


def run(cluster: Cluster, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks and return their findings, merged and with the user's severities, the worst first.

    A host with an error, or with nothing to go by, under a code is hidden from the checks that require it,
    so that one broken cause prints once. Raises `graphlib.CycleError` for checks that require each other.
    """
    broken: dict[str, set[str]] = {}
    found: list[Finding] = []
    for check in _causes_first(checks):
        hidden = {host for name in check.requires for host in broken.get(name, ())}
        visible = cluster.without(hidden)
        blind = list(_blind(check, visible))
        for finding in blind:
            for name in check.codes:
                broken.setdefault(name, set()).update(finding.hosts)
        seen = list(check.run(visible.without({host for finding in blind for host in finding.hosts})))
        for finding in seen:
            if finding.severity in (Severity.ERROR, Severity.NOT_CHECKED):
                broken.setdefault(finding.code, set()).update(finding.hosts)
        found += [*blind, *seen]
    order = list(Severity)
    merged = merge(found, list(cluster.hosts))
    # No setting makes a job start on a node that is not there.
    lost = [finding for finding in merged if cluster.unreachable.keys() & set(finding.hosts)]
    result = [*lost, *override((f for f in merged if f not in lost), cluster.plan.checks)]
    return sorted(result, key=lambda finding: order.index(finding.severity))


def merge(findings: Iterable[Finding], order: Sequence[str]) -> list[Finding]:
    """Make one finding of those that differ only in their hosts; hosts come in the given order."""
    merged: dict[Finding, set[str]] = {}
    for finding in findings:
        merged.setdefault(replace(finding, hosts=()), set()).update(finding.hosts)
    place = {host: index for index, host in enumerate(order)}
    return [
        replace(finding, hosts=tuple(sorted(hosts, key=lambda host: place.get(host, len(place)))))
        for finding, hosts in merged.items()
    ]


def _causes_first(checks: Sequence[Check]) -> list[Check]:
    provided: dict[str, list[int]] = {}
    for index, check in enumerate(checks):
        for name in check.codes:
            provided.setdefault(name, []).append(index)
    needs = {
        index: [other for name in check.requires for other in provided.get(name, ()) if other != index]
        for index, check in enumerate(checks)
    }
    return [checks[index] for index in TopologicalSorter(needs).static_order()]


def _blind(check: Check, cluster: Cluster) -> Iterator[Finding]:
    """Yield a `not_checked` for each host that lacks a fact which the check needs."""
    for host, node in cluster.nodes.items():
        missing = next((fact for fact in check.facts if fact not in node.facts), None)
        if missing is None:
            continue
        reason = node.errors.get(missing, "the probe said nothing of it")
        yield Finding(
            code=check.codes[0],
            severity=NOT_CHECKED,
            hosts=(host,),
            observed=f"could not look at {missing}: {reason}",
            why=f"Not checked there: {', '.join(check.codes)}. What was not seen does not count as fit.",
            fix=_STUCK if "no answer" in reason else f"log in there and look: {reason}",
        )
