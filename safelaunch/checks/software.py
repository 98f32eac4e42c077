"""Whether the training interpreters of all nodes hold the same versions."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from safelaunch.checks.base import ERROR, WARNING, Check, fold, groups, odd_ones
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safelaunch.facts import Cluster

_NEEDED = ("torch", "deepspeed")
_TITLES = {
    "torch": "torch",
    "deepspeed": "DeepSpeed",
    "python": "Python",
    "nccl": "NCCL",
    "cuda": "CUDA of torch",
}
_WHY = {
    "torch": "Ranks of different torch versions fail at the first collective, or wait for each other.",
    "deepspeed": "DeepSpeed's launcher gives the nodes options that another version does not know, and"
    " ranks of different versions partition the state differently.",
    "python": "Objects that ranks exchange are pickled; another minor version may not read them.",
    "nccl": "NCCL must be the same on all nodes: its protocol has no promise across versions.",
    "cuda": "The same model may compile, or fail, differently there.",
}


def versions(cluster: Cluster) -> Iterator[Finding]:
    """Compare versions between nodes; what torch brings along only if torch itself is equal."""
    for name, title in _TITLES.items():
        seen = {host: node["software"][name] for host, node in cluster.nodes.items()}
        missing = tuple(host for host, version in seen.items() if version is None)
        if name in _NEEDED and missing:
            yield _not_installed(cluster, name, missing, next(filter(None, seen.values()), None))
            seen = {host: version for host, version in seen.items() if version is not None}
        found = groups({host: version or "none" for host, version in seen.items()})
        if len(found) < 2:
            continue
        shown = "; ".join(f"{version} on {fold(hosts)}" for version, hosts in found)
        yield Finding(
            code=f"software.{name}",
            severity=WARNING if name == "cuda" else ERROR,
            hosts=odd_ones(found),
            observed=f"{title} differs: {shown}",
            why=_WHY[name],
            fix=_fix(cluster, name, found[0][0]),
        )
        if name == "torch":
            return


def _not_installed(cluster: Cluster, name: str, hosts: tuple[str, ...], version: str | None) -> Finding:
    return Finding(
        code=f"software.{name}",
        severity=ERROR,
        hosts=hosts,
        observed=f"{_TITLES[name]} is not installed for {cluster.plan.interpreter}",
        why="DeepSpeed's launcher on each node imports both.",
        fix=_fix(cluster, name, version or ""),
    )


def _fix(cluster: Cluster, name: str, version: str) -> str:
    interpreter = shlex.quote(cluster.plan.interpreter)
    if name in _NEEDED:
        wanted = shlex.quote(f"{name}=={version}" if version else name)
        return f"on the node: {interpreter} -m pip install {wanted}"
    if name == "python":
        return f"on the node: make {interpreter} a Python {version}"
    return (
        f"on the node: {interpreter} -m pip install --force-reinstall torch   # and with it {_TITLES[name]}"
    )


CHECKS = (
    Check(
        tuple(f"software.{name}" for name in _TITLES),
        versions,
        facts=("software",),
        requires=("path.interpreter",),
    ),
)
