"""A problem in what the user gave us or in their cluster, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Severity(str, Enum):
    """How bad a finding is; only ERROR refuses the launch."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file of the user's; line and column count from 1."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: what was observed, why it matters, and the command or line that fixes it.

    `code` is one of `catalogue.CODES`; `hosts` are names as in the hostfile, in its order.
    """

    code: str
    severity: Severity
    observed: str
    why: str
    fix: str
    hosts: tuple[str, ...] = ()
    where: Where | None = None

    def document(self) -> dict[str, Any]:
        """Return the finding as it stands in preflight.json."""
        where = self.where
        return {
            "code": self.code,
            "severity": self.severity.value,
            "hosts": list(self.hosts),
            "where": {"file": where.file, "line": where.line, "column": where.column} if where else None,
            "observed": self.observed,
            "why": self.why,
            "fix": self.fix,
        }


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return those findings that refuse a launch."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def override(findings: Iterable[Finding], rules: Mapping[str, str]) -> list[Finding]:
    """Apply the `[checks]` table of the settings: code or `prefix.*` to a severity name or "off".

    An exact code goes before a pattern, a longer pattern before a shorter one.
    """
    result = []
    for finding in findings:
        rule = _rule_for(finding.code, rules)
        if rule is None or finding.severity is Severity.NOT_CHECKED:
            result.append(finding)
        elif rule != "off":
            result.append(replace(finding, severity=Severity(rule)))
    return result


def _rule_for(code: str, rules: Mapping[str, str]) -> str | None:
    if code in rules:
        return rules[code]
    patterns = [p for p in rules if p.endswith("*") and code.startswith(p[:-1])]
    return rules[max(patterns, key=len)] if patterns else None
