"""One config under judgement: its values, where they stand, and what cannot be known of them yet."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safelaunch.ds_rules import kinds, tables
from safelaunch.findings import Finding, Severity, Where

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safelaunch.located import KeyPath, Place

MISSING = object()
"""What `View.get` returns where the config has no such key."""

_FILLED_IN = re.compile(
    r"\$\{|\{\{|%\(\w+\)s|^\$\w+,?$|^<[^<>]*>,?$|^__\w+__,?$|^@\w+@,?$|^[A-Z][A-Z0-9_]{2,},$"
)
_CAPITALS = re.compile(r"^[A-Z][A-Z0-9_]{2,},?$")
_WORDS_OF_A_VALUE = {"TRUE", "FALSE", "NULL", "NONE", "NAN", "AUTO", "INF", "YES", "OFF"}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A config that could be read, and by whose rules it is judged.

    `version` is the DeepSpeed release whose rules hold, `newer` that the installed one is past all tables.
    """

    value: Mapping[str, Any]
    places: Mapping[KeyPath, Place]
    file: str
    version: tables.Version
    newer: bool = False
    world_size: int | None = None
    script_args: Sequence[str] = field(default=())

    def get(self, *path: str) -> Any:
        """Return the value at a path, or MISSING."""
        value: Any = self.value
        for name in path:
            if not isinstance(value, dict) or name not in value:
                return MISSING
            value = value[name]
        return value

    def known(self, *path: str) -> Any:
        """Return the value at a path, or MISSING where it is absent, "auto" or a placeholder."""
        value = self.get(*path)
        return MISSING if is_open(value) else value

    def is_on(self, *path: str) -> bool:
        """Tell whether a value that is known is true to a model's boolean field."""
        value = self.known(*path)
        return value is not MISSING and kinds.as_bool(value) is True

    def is_true(self, *path: str) -> bool:
        """Tell whether a value that is known is true to Python, as in blocks without a model."""
        value = self.known(*path)
        return value is not MISSING and bool(value)

    def stage(self) -> int | None:
        """Return the ZeRO stage; None where it is not known yet or wrong."""
        zero = self.get("zero_optimization")
        if zero is MISSING:
            return 0
        if isinstance(zero, bool):
            return int(zero)
        stage = self.get("zero_optimization", "stage")
        if stage is MISSING and isinstance(zero, dict):
            return 0
        return None if stage is MISSING or is_open(stage) else kinds.as_stage(stage)

    def where(self, *path: str) -> Where:
        """Return the place of a key, or that of the innermost block around it which has one."""
        for length in range(len(path), 0, -1):
            place = self.places.get(path[:length])
            if place is not None:
                return Where(self.file, place.line, place.column)
        return Where(self.file, 1, 1)

    def finding(
        self, code: str, severity: Severity, path: Sequence[str], *, observed: str, why: str, fix: str
    ) -> Finding:
        """Return a finding about the key at a path."""
        return Finding(
            code=code, severity=severity, observed=observed, why=why, fix=fix, where=self.where(*path)
        )


def is_open(value: Any) -> bool:
    """Tell whether something else decides the value: "auto", or a placeholder.

    A word in capitals alone is not looked at here: only where it cannot be a value is it a placeholder.
    """
    return value == "auto" or is_placeholder(value, refused=False)


def is_placeholder(value: Any, *, refused: bool) -> bool:
    """Tell whether text is a gap for the user's own tool: `${stage}`, `{{ stage }}`, `<stage>`.

    `refused`: DeepSpeed would not take the text here, so that a word in capitals is a gap too
    (`ZERO_STAGE`). With the comma that Hjson takes into unquoted text it is one everywhere.
    """
    if not isinstance(value, str):
        return False
    if _FILLED_IN.search(value):
        return True
    return refused and bool(_CAPITALS.match(value)) and value.rstrip(",") not in _WORDS_OF_A_VALUE


def dotted(path: Sequence[str]) -> str:
    """Return a path as people write it, `zero_optimization.stage`, safe to print."""
    return json.dumps(".".join(path))[1:-1]


def shown(value: Any) -> str:
    """Return a value as it would stand in the file, on one line and short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**40:
        return "a number of more than 40 digits"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
