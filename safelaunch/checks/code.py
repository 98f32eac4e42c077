"""Whether all nodes will run the same program with the same DeepSpeed config."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from safelaunch.checks.base import (
    ERROR,
    NOT_CHECKED,
    WARNING,
    Check,
    copy_command,
    fold,
    groups,
    number,
    odd_ones,
)
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safelaunch.facts import Cluster

_SHOWN = 5


def code_differs(cluster: Cluster) -> Iterator[Finding]:
    """Compare the program and the local modules that it imports."""
    trees = {host: node["code"]["files"] for host, node in cluster.nodes.items() if node["code"]["files"]}
    found = groups({host: tuple(sorted(tree.items())) for host, tree in trees.items()})
    if len(found) > 1:
        yield Finding(
            code="code.differs",
            severity=ERROR,
            hosts=odd_ones(found),
            observed=_difference([(dict(tree), hosts) for tree, hosts in found]),
            why="Ranks that run different code compute different things, or wait for each other for ever.",
            fix=copy_command(_root(cluster), odd_ones(found), directory=True) + "   # if it is right here",
        )
        return
    cut = tuple(host for host, node in cluster.nodes.items() if not node["code"]["complete"])
    if cut and len(trees) > 1:
        count = max(len(tree) for tree in trees.values())
        yield Finding(
            code="code.differs",
            severity=NOT_CHECKED,
            hosts=cut,
            observed=f"only the first {number(count, 'module')} of the program were compared",
            why="There are too many, or the file system is slow; the rest may differ.",
            fix=f"{copy_command(_root(cluster), cut, directory=True)} --dry-run --itemize-changes --checksum",
        )
    yield from _git_differs(cluster)


def _git_differs(cluster: Cluster) -> Iterator[Finding]:
    commits = {host: node["code"]["git"] for host, node in cluster.nodes.items() if node["code"]["git"]}
    found = groups(commits)
    if len(found) > 1:
        shown = "; ".join(f"{commit[:12]} on {fold(hosts)}" for commit, hosts in found)
        yield Finding(
            code="code.differs",
            severity=WARNING,
            hosts=odd_ones(found),
            observed=f"the files that are run are equal, but the git commits around them are not: {shown}",
            why="Data files or modules that are loaded in another way may differ.",
            fix=f"on each node: cd {_root(cluster)} && git status && git checkout {found[0][0][:12]}",
        )


def config_differs(cluster: Cluster) -> Iterator[Finding]:
    """Compare the DeepSpeed configs at the paths that the ranks will read."""
    for path in cluster.plan.deepspeed_configs:
        whole = os.path.join(cluster.plan.cwd, path)
        rows = {host: node["configs"][path] for host, node in cluster.nodes.items()}
        for error, hosts in groups({host: row["error"] for host, row in rows.items() if "error" in row}):
            yield Finding(
                code="config.differs",
                severity=ERROR,
                hosts=hosts,
                observed=f"{whole}: {error}",
                why="Each rank reads the config from its own node.",
                fix=copy_command(whole, hosts, directory=False),
            )
        found = groups({host: row["hash"] for host, row in rows.items() if "hash" in row})
        if len(found) > 1:
            yield Finding(
                code="config.differs",
                severity=ERROR,
                hosts=odd_ones(found),
                observed=f"{whole} has {len(found)} contents: "
                + "; ".join(f"{digest} on {fold(hosts)}" for digest, hosts in found),
                why="Ranks with different batch sizes or ZeRO stages give wrong results, or hang.",
                fix=copy_command(whole, odd_ones(found), directory=False) + "   # if it is right here",
            )


def _difference(found: list[tuple[Mapping[str, str], tuple[str, ...]]]) -> str:
    """Say which files differ, and for the first ones where."""
    names = sorted(
        {name for tree, _hosts in found for name in tree if len({tree.get(name) for tree, _ in found}) > 1}
    )
    rows = []
    for name in names[:_SHOWN]:
        contents = groups({host: tree.get(name) for tree, hosts in found for host in hosts})
        sides = " / ".join(f"{fold(hosts)}{'' if content else ' (missing)'}" for content, hosts in contents)
        rows.append(f"{name}: {sides}")
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{number(len(names), 'file')} of the program {'differs' if len(names) == 1 else 'differ'}: "
        + "; ".join(rows)
        + more
    )


def _root(cluster: Cluster) -> str:
    program = cluster.plan.program
    if program is None or program.kind != "python":
        return cluster.plan.cwd
    return os.path.dirname(os.path.join(cluster.plan.cwd, program.script))


CHECKS = (
    Check(("code.differs",), code_differs, facts=("code",), requires=("path.cwd", "path.script")),
    Check(("config.differs",), config_differs, facts=("configs",), requires=("path.cwd",)),
)
