"""Reaching nodes: what the transport and the start of the probe ran into."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING

from safelaunch.catalogue import CODES
from safelaunch.checks.base import ERROR, WARNING, Check, duration, fold
from safelaunch.findings import Finding
from safelaunch.transport.base import Unreachable
from safelaunch.transport.program import NO_PYTHON, OLD_PYTHON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safelaunch.facts import Cluster

SLOW_FACTOR, SLOW_SECONDS = 10.0, 2.0
"""A node is slow that takes ten times as long as the median of the others, and long enough to matter."""
_PRINTABLE = re.compile(r"[^\x20-\x7e\u00a1-\uffff]+")
_SHOWN = 200
_GUARD = "at the top of ~/.bashrc on the node: case $- in *i*) ;; *) return ;; esac"


def unreachable(cluster: Cluster) -> Iterator[Finding]:
    """Report hosts that could not be opened or probed; those with the same fault together."""
    by_fault: dict[tuple[str, str], list[Unreachable]] = {}
    for lost in cluster.unreachable.values():
        by_fault.setdefault((lost.code, lost.why), []).append(lost)
    for (code, why), group in by_fault.items():
        hosts = tuple(lost.host for lost in group)
        observed = group[0].observed
        if any(lost.observed != observed for lost in group):
            observed = f"{fold(hosts[:1])}: {observed}; {fold(hosts[1:])}: the same"
        fix = "\n".join(dict.fromkeys(lost.fix for lost in group))
        yield Finding(code=code, severity=ERROR, hosts=hosts, observed=observed, why=why, fix=fix)


def remarks(cluster: Cluster) -> Iterator[Finding]:
    """Report what the transport noticed about hosts that it could open."""
    for host, node in cluster.nodes.items():
        for remark in node.remarks:
            yield Finding(
                code=remark.code,
                severity=WARNING,
                hosts=(host,),
                observed=remark.observed,
                why=remark.why,
                fix=remark.fix,
            )


def noise(cluster: Cluster) -> Iterator[Finding]:
    """Report shell start-up files that print, or fail, without a terminal."""
    for host, node in cluster.nodes.items():
        if node.noise.strip():
            yield Finding(
                code="ssh.noise",
                severity=WARNING,
                hosts=(host,),
                observed=f"the shell start-up printed without a terminal: {shorten(node.noise)}",
                why="A start-up file that talks or fails there breaks tools that read the output of commands,"
                " DeepSpeed's own launcher and rsync among them.",
                fix=_GUARD,
            )


def slow_answer(cluster: Cluster) -> Iterator[Finding]:
    """Report nodes that are slow to log in to, or to start a Python on."""
    times = {host: node.seconds + node.answer_seconds for host, node in cluster.nodes.items()}
    for host, seconds in times.items():
        others = [value for other, value in times.items() if other != host]
        if others and seconds > SLOW_SECONDS and seconds > SLOW_FACTOR * median(others):
            usual = median(others)
            yield Finding(
                code="node.slow_answer",
                severity=WARNING,
                hosts=(host,),
                observed=f"answered after {duration(seconds)}, the others after {duration(usual)}",
                why="It is overloaded, or its login waits for something (DNS, a directory service, a network"
                " home): it will hold up the start of the job, and perhaps every step.",
                fix=f"ssh {host} 'uptime; time true'",
            )


def probe_failure(
    host: str, *, status: int | None, output: str, late: float | None, seconds: float
) -> Unreachable:
    """Say why a host that could be opened showed nothing.

    `status` is the exit status of the start line (None: the connection broke), `output` what came instead of
    facts, `late` the seconds after which we gave up, `seconds` the time from the start.
    """
    said = f": {shorten(output)}" if output.strip() else ""
    code, observed, why, fix = (
        "node.probe_failed",
        f"the probe ended with status {status}{said}",
        "Without it nothing is known of the node, and the agent that starts the ranks would fail alike.",
        f"ssh {host} python3 -V   # must print a version and nothing else",
    )
    if late is not None:
        observed = f"the probe did not end within {duration(late)}{said}"
    elif status is None:
        code, observed = "ssh.closed", f"the connection broke while the probe ran{said}"
        why, fix = (
            "sshd or the machine went away, or something between closes connections.",
            f"ssh {host} uptime",
        )
    elif status == NO_PYTHON:
        code, observed = "ssh.python_missing", "no python3 on the PATH, nor the training interpreter"
        why = "The probe and the agent are Python programs; nothing is installed on a node."
        fix = "on the node: sudo apt-get install python3 || sudo dnf install python3"
    elif status == OLD_PYTHON:
        version = re.search(r"\d+\.\d+\.\d+", output)
        code, observed = "ssh.python_old", f"its python3 is {version.group() if version else 'too old'}"
        why = "The probe and the agent need Python 3.8 or newer; the training interpreter may be another."
        fix = "on the node: sudo apt-get install python3 || sudo dnf install python39   # first on the PATH"
    elif "no space left" in output.lower():
        code, observed = "ssh.no_space", f"no space left to start a program{said}"
        why, fix = "A node that can't write can't train.", f"ssh {host} df -h / /tmp /var"
    elif "Traceback" not in output:
        code = "ssh.account"
        observed = f"the login works, but our command did not run: it ended with status {status}{said}"
        why = "The account has no shell (nologin), is tied to one command, or its start-up exits."
        fix = f"ssh {host} true; on the node: getent passwd $USER"
    return Unreachable(host=host, code=code, observed=observed, why=why, fix=fix, seconds=seconds)


def shorten(text: str) -> str:
    """Return text of a stranger fit for one line of a message: its end, without control characters."""
    lines = [line for line in (_PRINTABLE.sub(" ", row).strip() for row in text.splitlines()) if line]
    words = " | ".join(lines)
    return words if len(words) <= _SHOWN else "..." + words[-_SHOWN:]


CHECKS = (
    Check(
        tuple(code for code in CODES if code.startswith("ssh.") or code == "node.probe_failed"), unreachable
    ),
    Check(("ssh.throttled", "ssh.host_key_unknown"), remarks),
    Check(("ssh.noise",), noise),
    Check(("node.slow_answer",), slow_answer),
)
