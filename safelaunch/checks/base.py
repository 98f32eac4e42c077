"""What every check is made of."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from safelaunch.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from safelaunch.facts import Cluster

    Value = TypeVar("Value", bound=Hashable)

ERROR, WARNING, INFO, NOT_CHECKED = Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.NOT_CHECKED
MIB, GIB = 1 << 20, 1 << 30
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Check:
    """A pure function from the cluster to findings with one of `codes`.

    The engine hides from `run` the hosts that lack one of `facts` (with a `not_checked` finding that says
    why) and those that already have an error under one of `requires`.
    """

    codes: tuple[str, ...]
    run: Callable[[Cluster], Iterable[Finding]]
    facts: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    level: str = "quick"


def fold(hosts: Iterable[str]) -> str:
    """Return host names in short: `node[1-3,7]`; names that would read as a pattern stay as they are."""
    from ClusterShell.NodeSet import NodeSet  # noqa: PLC0415 - only where a message names hosts
    from ClusterShell.NodeUtils import GroupResolver  # noqa: PLC0415

    plain, odd = NodeSet(resolver=GroupResolver()), []
    for host in hosts:
        if _PLAIN_NAME.fullmatch(host):
            plain.add(host)
        else:
            odd.append(host)
    return ",".join([*([str(plain)] if plain else []), *odd])


def groups(values: Mapping[str, Value]) -> list[tuple[Value, tuple[str, ...]]]:
    """Return each value with the hosts that have it, the most common first, else in the plan's order."""
    found: dict[Value, list[str]] = {}
    for host, value in values.items():
        found.setdefault(value, []).append(host)
    return sorted(((value, tuple(hosts)) for value, hosts in found.items()), key=lambda group: -len(group[1]))


def odd_ones(found: Sequence[tuple[Value, tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the hosts that differ from the majority; all hosts where there is none."""
    clear = len(found) > 1 and len(found[0][1]) > len(found[1][1])
    return tuple(host for _value, hosts in (found[1:] if clear else found) for host in hosts)


def copy_command(path: str, hosts: Sequence[str], *, directory: bool) -> str:
    """Return the line that copies a path of this machine to hosts."""
    word = shlex.quote(path + "/" if directory else path)
    if len(hosts) == 1:
        return f"rsync -a {word} {hosts[0]}:{word}"
    return f"for node in {' '.join(hosts)}; do rsync -a {word} $node:{word}; done"


def size(count: float) -> str:
    """Return bytes as people read them: `1.5 GiB`."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time as people read it: `3.2 s`, `5 min`, `2.0 h`."""
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"


def number(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 GPU`, `2 GPUs`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
