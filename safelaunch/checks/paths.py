"""Whether what DeepSpeed will use exists on each node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from safelaunch.checks.base import ERROR, NOT_CHECKED, Check, copy_command, groups
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safelaunch.facts import Cluster

_WHY = {
    "cwd": "Each rank starts in this directory; DeepSpeed would go on in another one, without a word.",
    "interpreter": "DeepSpeed starts this very path on every node.",
    "venv_script": "It is sourced on each node before the ranks start.",
    "script": "Each rank runs it from its own node.",
}
_STATES = {
    "missing": "{path} does not exist; what exists of it is {exists}",
    "dangling": "{path} is a link to {target}, which does not exist",
    "not_a_directory": "{path} is not a directory",
    "not_executable": "this user may not execute {path}",
    "unreadable": "this user may not read {path}",
    "not_found": "no module {path} in the working directory or where the interpreter looks",
}
_PERMISSIONS = {
    "not_executable": "on the node: chmod a+rx {path}",
    "unreadable": "on the node: chmod a+r {path}",
}


def existence(cluster: Cluster) -> Iterator[Finding]:
    """Report interpreter, working directory, script and venv script where they are not what they must be."""
    for role, why in _WHY.items():
        seen: dict[str, Any] = {
            host: node["paths"][role]
            for host, node in cluster.nodes.items()
            if role in node["paths"] and not _inside_missing_cwd(role, node["paths"])
        }
        nowhere = bool(seen) and all(row["state"] == "not_found" for row in seen.values())
        bad = {host: tuple(row.items()) for host, row in seen.items() if row["state"] != "ok"}
        for items, hosts in groups(bad):
            row = dict(items)
            yield Finding(
                code=f"path.{role}",
                # A module may also be found by a hook that only the interpreter knows (an editable install).
                severity=NOT_CHECKED if nowhere else ERROR,
                hosts=hosts,
                observed=_STATES[row["state"]].format(**row),
                why=why,
                fix=_fix(role, row, hosts),
            )


def _inside_missing_cwd(role: str, paths: dict[str, Any]) -> bool:
    cwd = paths["cwd"]
    return (
        role in ("script", "venv_script")
        and cwd["state"] != "ok"
        and paths[role]["path"].startswith(cwd["path"])
    )


def _fix(role: str, row: dict[str, Any], hosts: tuple[str, ...]) -> str:
    path, state = row["path"], row["state"]
    if state in _PERMISSIONS:
        return _PERMISSIONS[state].format(path=path)
    if state == "dangling":
        return copy_command(row["target"], hosts, directory=False)
    if state == "not_found":
        return f"on the node, in the working directory: python -m {path} --help"
    if role == "interpreter":
        prefix = os.path.dirname(os.path.dirname(path))
        return f"{copy_command(prefix, hosts, directory=True)}   # or mount {prefix} there"
    return copy_command(path, hosts, directory=role == "cwd") + f"   # or mount {os.path.dirname(path)} there"


CHECKS = (
    Check(("path.interpreter", "path.cwd", "path.script", "path.venv_script"), existence, facts=("paths",)),
)
