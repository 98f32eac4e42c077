"""Our own words: always on stderr, short, and never in the way of what the script prints."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from safelaunch.findings import Finding, Severity
from safelaunch.hostnames import fold_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "cyan",
    Severity.NOT_CHECKED: "dim",
}
_ORDER = [Severity.ERROR, Severity.WARNING, Severity.NOT_CHECKED, Severity.INFO]


class Console:
    """Writes lines to stderr; colours only on a terminal that wants them."""

    def __init__(self, stream: TextIO, *, plain: bool, verbosity: int) -> None:
        """`plain` is --plain, --no-color or NO_COLOR; `verbosity` counts --verbose."""
        self._stream = stream
        self._verbosity = verbosity
        self._rich: Any = None
        if stream.isatty() and not plain and not os.environ.get("NO_COLOR"):
            from rich.console import Console as Rich  # noqa: PLC0415 - not needed in a job log

            self._rich = Rich(file=stream, highlight=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        """Print one line of ours."""
        self.line(f"safelaunch: {text}", style)

    def line(self, text: str, style: str = "") -> None:
        """Print a line as it is; text that the stream can't encode is escaped, never an error."""
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            if self._rich is not None:
                self._rich.print(text, style=style or None, markup=False)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except (BrokenPipeError, ValueError):
            # Nobody reads our words any more; the job is not to die of that.
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            self._stream, self._rich = sys.stderr, None

    def findings(self, findings: Iterable[Finding]) -> None:
        """Print findings, the worst first; what was only for information comes with --verbose."""
        for finding in sorted(findings, key=lambda f: _ORDER.index(f.severity)):
            if self._verbosity or finding.severity in (Severity.ERROR, Severity.WARNING):
                self._finding(finding)

    def _finding(self, finding: Finding) -> None:
        place = f"  {finding.where}" if finding.where else ""
        hosts = f"  {_fold(finding.hosts)}" if finding.hosts else ""
        label = finding.severity.value.replace("_", " ")
        self.line(f"{label}: {finding.code}{hosts}{place}", _STYLES[finding.severity])
        for text in (finding.observed, finding.why, f"fix: {finding.fix}" if finding.fix else ""):
            for row in text.splitlines():
                self.line(f"    {row}")

    def verdict(self, outcome: Mapping[str, Any], path: str) -> None:
        """Print how the run ended."""
        if outcome["exit_status"] == 0:
            self.say(f"{outcome['summary']} in {outcome['seconds']:.0f} s; run directory {path}", "green")
            return
        self.line(
            f"safelaunch: {outcome['status'].replace('_', ' ').upper()}: {outcome['summary']}", "bold red"
        )
        failure = outcome.get("first_failure") or {}
        culprit = outcome.get("culprit") or {}
        rows = {
            "where": culprit.get("location"),
            "next": failure.get("hint"),
            "others": "; ".join(
                f"rank{'s' * (len(group['ranks']) > 1)} {fold_numbers(group['ranks'])} {group['what']}"
                for group in outcome["others"]
            ),
            "log": _log(culprit, path),
            "not seen": _unseen(outcome["unconfirmed"]),
            "survivors": ", ".join(f"{s['host']} pid {s['pid']}" for s in outcome["survivors"]),
        }
        for name, text in rows.items():
            if text:
                self.line(f"    {name + ':':10} {text}")


def _unseen(hosts: list[str]) -> str:
    if not hosts:
        return ""
    return f"what is left on {_fold(tuple(hosts))}; when it is back: safelaunch clean"


def _fold(hosts: tuple[str, ...]) -> str:
    from safelaunch.checks import fold  # noqa: PLC0415 - ClusterShell, only when there is something to say

    return fold(hosts)


def _log(culprit: Mapping[str, Any], path: str) -> str:
    if culprit.get("ranks"):
        return os.path.join(path, "logs", f"rank-{culprit['ranks'][0]}.err")
    if culprit.get("reason") == "launcher_died" and culprit.get("hosts"):
        return os.path.join(path, "logs", f"node-{culprit['hosts'][0]}.log")
    return path
