"""The filter language of `--include` and `--exclude`: `NAME[:SLOT[,SLOT...]]`, several joined by `@`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from safelaunch.hostnames import describe, expand, flaw

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_LONGEST_REPAIRED = 10_000
"""Characters of a filter that we still try to correct."""
_REPAIRED_RANGE = 64
"""Slots that a range in a filter is written out to."""
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
# What int() takes, but for underscores: deepspeed reads blanks around a number and a sign.
_SLOT = re.compile(r"\s*[+-]?[0-9]{1,9}\s*")


@dataclass(frozen=True, slots=True)
class Mention:
    """A host named in a filter; `slots` is None for the whole host, else (number, offset in the filter)."""

    host: str
    offset: int
    slots: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class Fault:
    """Where a filter leaves the grammar; `offset` counts from 0."""

    offset: int
    observed: str


def parse(text: str, known: Collection[str]) -> tuple[list[Mention], list[Fault]]:
    """Read a filter: what it names, known or not, and each place where it leaves the grammar.

    The known names settle where a name ends that holds `@` or `:` itself, which deepspeed can't tell.
    """
    mentions: list[Mention] = []
    faults: list[Fault] = []
    for start, piece in _pieces(text, known):
        parsed = parse_piece(start, piece, known)
        if isinstance(parsed, Fault):
            faults.append(parsed)
        else:
            mentions.append(parsed)
    return mentions, faults


def _pieces(text: str, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield offset and text of what stands between `@`; `user@host` stays whole where it is a host's name."""
    parts = text.split("@")
    users = any("@" in name for name in known)
    start = index = 0
    while index < len(parts):
        taken = 1
        if users and _split(parts[index], known)[0] not in known:
            joined = ("@".join(parts[index : index + count]) for count in (2, 3))
            taken = next((n for n, name in enumerate(joined, 2) if _split(name, known)[0] in known), 1)
        piece = "@".join(parts[index : index + taken])
        yield start, piece
        start += len(piece) + 1
        index += taken


def _split(piece: str, known: Collection[str]) -> tuple[str, str | None]:
    """Part a name from its slots; a name may hold colons itself (IPv6), which deepspeed can't do."""
    if piece in known or ":" not in piece:
        return piece, None
    name, _, slots = piece.rpartition(":")
    if name not in known:
        if piece.count(":") > 1 and flaw(piece) is None:
            return piece, None
        name, _, slots = piece.partition(":")
    return name, slots


def parse_piece(start: int, piece: str, known: Collection[str]) -> Mention | Fault:
    """Read one host of a filter; `start` is the offset of the piece in it."""
    name, slots = _split(piece, known)
    if not name.strip():
        return Fault(start, "a host name is missing")
    if name not in known:
        odd = re.search(r"[\s,;=*?\[\]{}]", name)
        if odd:
            return Fault(start + odd.start(), f"{describe(odd[0])} in a host name")
    if slots is None:
        return Mention(name, start, None)
    offset = start + len(name) + 1
    numbers = []
    for item in slots.split(","):
        if not _SLOT.fullmatch(item):
            odd = re.search(r"[^0-9\s]", item)
            if odd:
                return Fault(offset + odd.start(), f"{describe(odd[0])} in a slot number")
            return Fault(offset, "a slot number is too long" if item.strip() else "a slot number is missing")
        numbers.append((int(item.strip()), offset + len(item) - len(item.lstrip())))
        offset += len(item) + 1
    return Mention(name, start, tuple(numbers))


def guess(text: str, known: Collection[str]) -> str | None:
    """Return a filter that can be read and names known hosts, as this one was probably meant."""
    meant = "@".join(_guesses(text, known)) if len(text) <= _LONGEST_REPAIRED else ""
    mentions, faults = parse(meant, known)
    return None if faults or any(mention.host not in known for mention in mentions) else meant


def _guesses(text: str, known: Collection[str]) -> Iterator[str]:
    wanted: dict[str, list[str]] = {}
    name = ""
    for token in re.findall(r"[^@,;\s\[\]]+(?:\[[^\]]*\])?[^@,;\s]*", text):
        if not _SPAN.fullmatch(token):
            name, _, slots = token.replace("=", ":").partition(":")
            wanted.setdefault(name, [])
        else:
            slots = token
        for item in slots.split(":"):
            if name and (span := _SPAN.fullmatch(item)):
                first, last = int(span[1]), int(span[2] or span[1])
                wanted[name] += [
                    str(number) for number in range(first, min(last, first + _REPAIRED_RANGE) + 1)
                ]
    for wish, slots_of in wanted.items():
        for one in _hosts_like(wish, known):
            yield f"{one}:{','.join(dict.fromkeys(slots_of))}" if slots_of else one


def _hosts_like(wish: str, known: Collection[str]) -> Collection[str]:
    if "*" in wish or "?" in wish:
        return [name for name in known if fnmatchcase(name, wish)]
    try:
        return expand(wish) or [wish]
    except ValueError:
        return [wish]
