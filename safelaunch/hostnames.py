"""What may stand as a host's name: judged, expanded from patterns, folded for messages."""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import shlex
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PATTERN_HOSTS = 65_536
"""Hosts that one pattern may stand for."""

LONGEST = 253
"""Characters of a domain name at most (RFC 1035)."""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._+@-]")
_ZONE = re.compile(r"[A-Za-z0-9._-]+")
_RANGES = r"\d{1,9}(?:-\d{1,9}(?:/\d{1,9})?)?"
PATTERN = re.compile(
    rf"(?:[A-Za-z0-9._+-]+@)?(?:[A-Za-z0-9._-]*\[{_RANGES}(?:,{_RANGES})*\](?!\d))+[A-Za-z0-9._-]*", re.ASCII
)
"""`n[1-4,7]` and the like, `user@` in front or not; steps are written `n[0-8/2]`.

No digit may follow a bracket: NodeSet would multiply the numbers in it.
"""
_FOLDABLE = re.compile(r"[A-Za-z0-9._-]+")
_LOOPBACK = re.compile(r"localhost[46]?(\.localdomain[46]?)?|ip6-(localhost|loopback)|.*\.localhost")
_SPOKEN = {" ": "a blank", "\t": "a tab", "`": "a backtick"}
BRACKET = "pdsh would expand the bracket, and ssh resolves no address in brackets"
"""Why a bracket can't stand in a name."""
_WHY = {
    ",": "a hostfile has one host a line; pdsh would start this on several nodes that have no rank",
    ":": "pdsh and ssh find no host of that name; slots are written ` slots=N`, and a port belongs in"
    " ~/.ssh/config or --ssh_port",
    "[": BRACKET,
    "]": BRACKET,
    "=": "the line must begin with the host name and a blank",
}


@dataclass(frozen=True, slots=True)
class NameFlaw:
    """Why a name is no host's; `offset` counts characters from 0.

    `doubtful` where the name can be used, but hardly means what was meant.
    """

    offset: int
    observed: str
    why: str
    doubtful: bool = False


def flaw(name: str) -> NameFlaw | None:
    """Judge a name as it would be given to ssh and pdsh: `host`, `user@host`, an IPv4 or a bare IPv6 address.

    What these, or a shell on the way, would take for an option, a list, a pattern or a command is refused.
    """
    user, at, host = name.rpartition("@")
    start = len(user + at)
    for offset, part in ((0, name), (start, host)):
        if part.startswith("-"):
            why = "ssh and pdsh take what begins with `-` for an option, not for a host"
            return NameFlaw(offset, "the host name begins with `-`", why)
    if len(name) > LONGEST:
        return NameFlaw(LONGEST, f"a name of {len(name)} characters", f"no host name has more than {LONGEST}")
    doubtful = None
    for match in _NOT_IN_A_NAME.finditer(name, endpos=start if _is_ipv6(host) else len(name)):
        character, offset = match[0], match.start()
        if not character.isascii() and unicodedata.category(character)[0] in "LMN":
            doubtful = offset if doubtful is None else doubtful
            continue
        why = _WHY.get(character) or (
            "pdsh or a shell would expand it or take it for something else"
            if " " < character < "\x7f"
            else "a host name holds only letters, digits, `.`, `-` and `_`"
        )
        return NameFlaw(offset, f"{describe(character)} in the host name", why)
    if (at and not user) or not any(character.isalnum() for character in host):
        offset = 0 if at and not user else start
        return NameFlaw(offset, f"`{show(name)}` is no host name", "there is nowhere to connect to")
    if doubtful is None:
        return None
    observed = f"{describe(name[doubtful])} in the host name"
    why = "it is no ASCII letter though it may look like one, and few name services know such names"
    return NameFlaw(doubtful, observed, why, doubtful=True)


def expand(pattern: str) -> tuple[str, ...] | None:
    """Return the names that `n[1-4,7]` stands for, in numeric order; None where it is no such pattern.

    Raises ValueError, with a reason to show, for one that makes no sense or stands for too many hosts.
    """
    if not PATTERN.fullmatch(pattern):
        return None
    count = math.prod(
        sum(_range_size(part) for part in group.split(",")) for group in re.findall(r"\[([^]]*)\]", pattern)
    )
    if count > MAX_PATTERN_HOSTS:
        raise ValueError(f"it stands for {count} hosts, more than {MAX_PATTERN_HOSTS}")
    # Slow to import, and only patterns need it.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415

    user, at, name = pattern.rpartition("@")
    try:
        return tuple(user + at + node for node in NodeSet(name, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(str(error)) from error


def fold(names: Iterable[str]) -> str:
    """Return names in short form, `node[01-16,18]`, for a message; the order may change."""
    # Slow to import, and only messages need it.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet  # noqa: PLC0415

    names = list(names)
    foldable = [name for name in names if _FOLDABLE.fullmatch(name)]
    rest = [show(name) for name in names if not _FOLDABLE.fullmatch(name)]
    folded = [str(NodeSet.fromlist(foldable, resolver=RESOLVER_NOGROUP))] if foldable else []
    return ",".join(folded + rest)


def fold_numbers(numbers: Iterable[int]) -> str:
    """Return ranks in short form, `0-2,5`."""
    from ClusterShell.RangeSet import RangeSet  # noqa: PLC0415 - slow to import, and only messages need it

    return str(RangeSet(",".join(map(str, numbers))))


def host_part(name: str) -> str:
    """Return a host's name without `user@`."""
    return name.rpartition("@")[2]


def machine(name: str) -> str:
    """Return what two names of the same machine have in common, as far as the names alone tell."""
    host = host_part(name).rstrip(".")
    address = _address(host)
    return host if address is None else str(address)


def is_loopback(name: str) -> bool:
    """Whether a host's name means whichever machine it is used on."""
    host = machine(name).lower()
    address = _address(host)
    return address.is_loopback if address is not None else _LOOPBACK.fullmatch(host) is not None


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names most like this one: those equal but for case or domain first."""
    known = list(known)
    short = name.lower().partition(".")[0]
    alike = [other for other in known if host_part(other).lower().partition(".")[0] == short]
    return list(dict.fromkeys(alike + difflib.get_close_matches(name, known[:5000], n=3)))[:3]


def describe(character: str) -> str:
    """Name a character so that also one that can't be seen is found."""
    if "\udc80" <= character <= "\udcff":
        return f"byte 0x{ord(character) - 0xDC00:02x}, which is not UTF-8,"
    if character in _SPOKEN:
        return _SPOKEN[character]
    if " " < character < "\x7f":
        return f"`{character}`"
    return f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()


def show(text: str, limit: int = 80) -> str:
    """Return text for a terminal: shortened, with everything escaped that would not print."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """Return text as one word of a shell line that is shown."""
    return show(shlex.quote(text), 1000)


def _is_ipv6(host: str) -> bool:
    address, percent, zone = host.partition("%")
    return ":" in address and _address(address) is not None and (not percent or bool(_ZONE.fullmatch(zone)))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _range_size(part: str) -> int:
    bounds, _, step = part.partition("/")
    first, _, last = bounds.partition("-")
    return max((int(last or first) - int(first)) // (int(step or 1) or 1) + 1, 0)
