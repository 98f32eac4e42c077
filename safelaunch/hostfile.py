"""Hostfiles: bytes to hosts and findings.

What DeepSpeed reads and gets right is read the same way and said nothing about. What it reads as something
else, or refuses without naming the line, is a finding with line, column and the corrected line.
"""

from __future__ import annotations

import codecs
import re
import stat as stat_bits
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safelaunch.findings import Finding, Severity, Where
from safelaunch.hostnames import BRACKET, PATTERN, describe, expand, machine, quoted, show
from safelaunch.hostnames import flaw as judge

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

MAX_SLOTS = 4096
"""More slots than this on one host is a slip of the finger: no machine runs that many ranks."""
_SPELLED_OUT = 8
"""Up to so many hosts, a refused pattern is corrected to one line a host, which stock DeepSpeed reads too."""
_LONGEST_REPAIRED = 1000
"""Characters of a line that we still try to correct."""

# The stock pattern (deepspeed/launcher/runner.py, _parse_hostfile), which is anchored only at its start.
_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)")
_KEYWORD = "slots="
_DIRECTIVE = re.compile(r"#\s*safelaunch:\s*patterns\s*")
_SLOTS_ANYHOW = re.compile(r"(?<![\w-])(?:slots?|gpus?)\s*[:=]?\s*(\d+)", re.IGNORECASE | re.ASCII)
_PORT = re.compile(r"\A([^:]*|\[[^\]]*\]):\d*\Z")
_ADDRESS_IN_BRACKETS = re.compile(r"\[([0-9A-Fa-f:.]+)\]\Z")
_ANOTHER_SLOTS = re.compile(r"(?<![\w-])slots\s*=", re.IGNORECASE)

_REFUSED = "deepspeed refuses the whole hostfile for this line, without naming it"


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hostfile: the name as ssh will get it, and how many ranks (devices 0..slots-1)."""

    name: str
    slots: int
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class ParsedHostfile:
    """All readable hosts in file order, and everything wrong with the file."""

    hosts: tuple[Host, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Flaw:
    """What is wrong with a line; `offset` counts characters from 0."""

    code: str
    offset: int
    observed: str
    why: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True)
class _Line:
    """A line as read: `names` is empty where it gives no host."""

    number: int
    text: str
    names: tuple[str, ...] = ()
    slots: int = 0
    flaws: tuple[_Flaw, ...] = ()


_BYTE_ORDER_MARK = _Flaw(
    "hostfile.syntax",
    0,
    "the file begins with a byte order mark, which is invisible",
    "deepspeed makes it part of the first host name, and ssh then finds no such host",
)


def parse(text: bytes, file: str) -> ParsedHostfile:
    """Read a hostfile; `file` is its name for messages.

    A line that deepspeed would read gives its host even where it has a finding, so that later checks see
    the same world; a name that ssh, pdsh or a shell would take for something else never becomes a host.
    """
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return ParsedHostfile((), (_utf16(file),))
    lines = _read(text)
    usual = Counter(line.slots for line in lines if line.names and line.slots).most_common(1)
    hosts: list[Host] = []
    findings: list[Finding] = []
    seen: dict[str, tuple[int, str]] = {}
    for line in lines:
        findings += _findings(line, file, usual[0][0] if usual else None)
        for name in line.names:
            again = _duplicate(name, line, file, seen)
            findings += [again] if again else []
            if again is None or again.severity is not Severity.ERROR:
                column = len(line.text) - len(line.text.lstrip()) + 1
                hosts.append(Host(name, line.slots, Where(file, line.number, column)))
    if not hosts and not findings:
        findings.append(_empty(file))
    return ParsedHostfile(tuple(hosts), tuple(findings))


def ownership_findings(
    file: str, stat: os.stat_result, uid: int, job_start: float | None
) -> tuple[Finding, ...]:
    """Judge who may write a hostfile and how old it is.

    `uid` is ours; `job_start` is when the Slurm job started (seconds since the epoch), None outside of one.
    """
    if not stat_bits.S_ISREG(stat.st_mode):
        return ()
    found = []
    if stat.st_uid != uid and stat.st_mode & stat_bits.S_IWOTH:
        found.append(
            Finding(
                code="hostfile.foreign",
                severity=Severity.WARNING,
                observed=f"{show(file, 200)} belongs to user id {stat.st_uid} and everyone may write to it",
                why="whoever changes it decides where your job runs and which hosts get your ssh login",
                fix=f"cp {quoted(file)} ~/my-hosts && chmod 600 ~/my-hosts; use --hostfile ~/my-hosts",
                where=Where(file),
            )
        )
    if job_start is not None and stat.st_mtime < job_start:
        hours = (job_start - stat.st_mtime) / 3600
        found.append(
            Finding(
                code="hostfile.stale",
                severity=Severity.WARNING,
                observed=f"{show(file, 200)} was written {hours:.1f} hours before this Slurm job started",
                why="it may name the nodes of an earlier job",
                fix=f"scontrol show hostnames | sed 's/$/ slots=8/' > {quoted(file)} (8 GPUs a node)",
                where=Where(file),
            )
        )
    return tuple(found)


def _read(text: bytes) -> list[_Line]:
    # Universal newlines, as deepspeed opens the file; what is not UTF-8 becomes lone surrogates.
    lines = re.split(r"\r\n|\r|\n", text.decode("utf-8", "surrogateescape"))
    patterns = False
    result = []
    for number, line in enumerate(lines, 1):
        body = line.strip()
        if body.startswith("#"):
            patterns = patterns or _DIRECTIVE.fullmatch(body) is not None
        elif body:  # a comment behind a byte order mark too: deepspeed takes it for a host
            result.append(_examine(number, line, patterns=patterns))
    return result


def _examine(number: int, line: str, *, patterns: bool) -> _Line:
    text = line.lstrip("\ufeff") if number == 1 else line
    body = text.strip()
    start = len(line) - len(text.lstrip())
    mark = (_BYTE_ORDER_MARK,) if text is not line else ()
    if body[:1] in ("", "#"):
        return _Line(number, line, flaws=mark)
    name = body.split(None, 1)[0]
    names, flaws = _names(name, patterns=patterns)
    slots: int | None = 0
    if not any(flaw.severity is Severity.ERROR for flaw in flaws):
        match = _ENTRY.match(body)
        slots, more = _slots(match, body) if match else (None, (_departure(body, name),))
        flaws = flaws + more
    moved = tuple(replace(flaw, offset=flaw.offset + start) for flaw in flaws)
    return _Line(number, line, () if slots is None else names, slots or 0, mark + moved)


def _names(token: str, *, patterns: bool) -> tuple[tuple[str, ...], tuple[_Flaw, ...]]:
    """Return the hosts that the first word of a line stands for; none where it can't be used."""
    if re.match(r"slots\s*[=:]", token, re.IGNORECASE):
        return (), (_Flaw("hostfile.syntax", 0, "no host name stands in front of `slots`", _REFUSED),)
    try:
        expanded = expand(token)
    except ValueError as error:
        observed = f"the pattern can't be used: {error}"
        return (), (_Flaw("hostfile.pattern", token.index("["), observed, BRACKET),)
    if expanded is None:
        found = judge(token)
        if found is None:
            return (token,), ()
        severity = Severity.WARNING if found.doubtful else Severity.ERROR
        return (token,) if found.doubtful else (), (
            _Flaw("hostfile.syntax", found.offset, found.observed, found.why, severity),
        )
    if patterns:
        return expanded, ()
    flaw = _Flaw(
        "hostfile.pattern",
        token.index("["),
        f"`{show(token)}` is a pattern, from {expanded[0]} to {expanded[-1]}",
        "deepspeed counts it as one host while pdsh starts it on all of them; patterns are read only below"
        " a line `# safelaunch: patterns`",
    )
    return (), (flaw,)


def _departure(body: str, name: str) -> _Flaw:
    """Say where a line without a readable ` slots=N` leaves the grammar."""
    rest = body[len(name) :].lstrip()
    at = len(body) - len(rest)
    if not rest or rest.startswith("#"):
        return _Flaw("hostfile.syntax", len(name), f"`{show(name)}` has no `slots=`", _REFUSED)
    common = next((i for i, (a, b) in enumerate(zip(rest, _KEYWORD, strict=False)) if a != b), None)
    if common is None:
        common = min(len(rest), len(_KEYWORD))
    offset = at + common
    found = describe(body[offset]) if offset < len(body) else "the end of the line"
    expected = "a whole number" if common == len(_KEYWORD) else f"`{_KEYWORD}N` (lower case, no blanks)"
    return _Flaw("hostfile.syntax", offset, f"{found} where {expected} should stand", _REFUSED)


def _slots(match: re.Match[str], body: str) -> tuple[int | None, tuple[_Flaw, ...]]:
    """Return the number as deepspeed reads it (None: not to be used), and what is wrong from there on."""
    digits = match[2]
    foreign = next((i for i, digit in enumerate(digits) if not "0" <= digit <= "9"), None)
    if len(digits) > 20 or int(digits) > MAX_SLOTS:
        observed = f"slots={show(digits)}: more than {MAX_SLOTS}"
        why = "no machine has so many devices, and every slot becomes a process"
        return None, (_Flaw("hostfile.syntax", match.start(2), observed, why),)
    slots = int(digits)
    if foreign is not None:
        observed = f"{describe(digits[foreign])} in the number"
        flaw = _Flaw("hostfile.syntax", match.start(2) + foreign, observed, "only the digits 0 to 9 are safe")
        return slots, (flaw,)
    flaws = _tail(body, match.end(), digits)
    if slots == 0 and not any(flaw.severity is Severity.ERROR for flaw in flaws):
        why = "deepspeed gives it no rank, and if it is the first host nobody answers at the master address"
        flaws = (
            _Flaw("hostfile.zero_slots", match.start(2), f"`{show(match[1])}` has slots=0", why),
            *flaws,
        )
    return slots, flaws


def _tail(body: str, end: int, digits: str) -> tuple[_Flaw, ...]:
    """Judge what stands behind the number, which deepspeed drops without a word."""
    tail = body[end:]
    if not tail or tail.startswith("#"):
        return ()
    if not tail[0].isspace():
        observed = f"{describe(tail[0])} right behind the number"
        why = f"deepspeed reads slots={digits} and drops the rest of the line"
        return (_Flaw("hostfile.syntax", end, observed, why),)
    words = re.split(r"\s#", tail, maxsplit=1)[0]
    stripped = words.lstrip()
    offset = end + len(words) - len(stripped)
    if not stripped or stripped.startswith("#"):
        return ()
    for index, character in enumerate(words):
        if "\udc80" <= character <= "\udcff":
            observed = f"{describe(character)} behind the slots"
            return (_Flaw("hostfile.syntax", end + index, observed, "deepspeed can't read the file"),)
    if another := _ANOTHER_SLOTS.search(words):
        observed = "another `slots=` on the same line"
        why = f"deepspeed reads slots={digits} and drops the rest, with any host that stands there"
        return (_Flaw("hostfile.ignored_field", end + another.start(), observed, why),)
    why = "deepspeed reads nothing behind the slots, so it has no effect"
    observed = f"`{show(stripped.rstrip())}` behind the slots"
    return (_Flaw("hostfile.ignored_field", offset, observed, why, Severity.WARNING),)


def _findings(line: _Line, file: str, usual: int | None) -> Iterator[Finding]:
    for flaw in line.flaws:
        yield Finding(
            code=flaw.code,
            severity=flaw.severity,
            observed=f"{flaw.observed}: {show(line.text.strip())}",
            why=flaw.why,
            fix=_corrected(line, flaw, file, usual),
            hosts=line.names if len(line.names) == 1 else (),
            where=Where(file, line.number, flaw.offset + 1),
        )


def _duplicate(name: str, line: _Line, file: str, seen: dict[str, tuple[int, str]]) -> Finding | None:
    key = machine(name)
    if key.lower() not in seen:
        seen[key.lower()] = (line.number, key)
        return None
    number, spelling = seen[key.lower()]
    same = spelling == key
    return Finding(
        code="hostfile.duplicate",
        severity=Severity.ERROR if same else Severity.WARNING,
        observed=f"`{name}` on line {line.number} "
        + (f"stands on line {number} too" if same else f"is `{spelling}` of line {number} in other letters"),
        why="two node launchers would start on one machine and take the same devices"
        + ("" if same else ": name services do not tell upper from lower case"),
        fix=f"# {show(line.text.strip(), _LONGEST_REPAIRED)}",
        hosts=(name,),
        where=Where(file, line.number, len(line.text) - len(line.text.lstrip()) + 1),
    )


def _empty(file: str) -> Finding:
    return Finding(
        code="hostfile.empty",
        severity=Severity.ERROR,
        observed=f"{show(file, 200)} names no host",
        why="there is nowhere to start a rank",
        fix=f"echo 'node1 slots=8' >> {quoted(file)}, with the name of each node and its number of GPUs",
        where=Where(file),
    )


def _utf16(file: str) -> Finding:
    name = quoted(file)
    return Finding(
        code="hostfile.syntax",
        severity=Severity.ERROR,
        observed=f"{show(file, 200)} is UTF-16 text",
        why="deepspeed, ssh and pdsh read UTF-8",
        fix=f"iconv -f UTF-16 -t UTF-8 {name} > {name}.utf8 && mv {name}.utf8 {name}",
        where=Where(file, 1, 1),
    )


def _corrected(line: _Line, flaw: _Flaw, file: str, usual: int | None) -> str:
    """Return what to write instead of the line (one line a host), or what to do where that is unknown."""
    body = line.text.strip()
    if flaw is _BYTE_ORDER_MARK:
        return rf"sed -i '1s/^\xef\xbb\xbf//' {quoted(file)}"
    if flaw.code == "hostfile.zero_slots":
        return f"# {show(body, _LONGEST_REPAIRED)}"
    if len(body) <= _LONGEST_REPAIRED:
        for candidate in _candidates(body, usual):
            lines = _read(candidate.encode("utf-8", "surrogateescape"))
            if any(entry.names for entry in lines) and not any(entry.flaws for entry in lines):
                return candidate
    if flaw.severity is Severity.WARNING:
        return "type the host name again in ASCII letters, or `xn--...` for an international name"
    name = line.names[0] if len(line.names) == 1 else _cleaned(body).split(" ", 1)[0]
    usable = bool(name) and judge(name) is None
    return f"{name if usable else 'NAME'} slots=N, with N the number of GPUs to use on that host"


def _candidates(body: str, usual: int | None) -> Iterator[str]:
    head, mark, comment = _cleaned(body).partition("#")
    if flawed := PATTERN.match(head):
        yield from _pattern_candidates(flawed[0], head)
    found: list[tuple[str, int]] = []
    end = 0
    for match in _SLOTS_ANYHOW.finditer(head):
        found += [(name, int(match[1])) for name in _named(head[end : match.start()])]
        end = match.end()
    if not end:
        bare = re.fullmatch(r"(\S+?)(?:[\s:=]+(\d{1,4}))?\s*", head, re.ASCII)
        slots = (int(bare[2]) if bare[2] else usual) if bare else None
        found = [(name, slots) for name in _named(bare[1])] if bare and slots else []
    if found:
        remark = f" #{comment}" if mark and len(found) == 1 and comment.isprintable() else ""
        yield "\n".join(f"{name} slots={slots}{remark}" for name, slots in found)


def _pattern_candidates(pattern: str, head: str) -> Iterator[str]:
    match = _SLOTS_ANYHOW.search(head)
    if match is None:
        return
    try:
        names = expand(pattern) or ()
    except ValueError:
        return
    if len(names) <= _SPELLED_OUT:
        yield "\n".join(f"{name} slots={int(match[1])}" for name in names)
    yield f"# safelaunch: patterns\n{pattern} slots={int(match[1])}"


def _named(text: str) -> Iterable[str]:
    """Return the host names in front of a `slots=`: words that blanks alone part are no list of hosts."""
    words = [word for word in re.split(r"[\s,;|]+", text) if word and not re.match(r"[\w-]+=", word)]
    if len(words) > 1 and not re.search(r"[,;|]", text):
        return []
    return [_ADDRESS_IN_BRACKETS.sub(r"\1", _PORT.sub(r"\1", word)) for word in words]


def _cleaned(body: str) -> str:
    """Return a line with look-alikes made ASCII and without quotes, list marks and invisible characters."""
    text = unicodedata.normalize("NFKC", body)
    text = "".join("-" if unicodedata.category(character) == "Pd" else character for character in text)
    text = "".join(c for c in text if c.isspace() or (c.isprintable() and c not in "\"'`"))
    return re.sub(r"\s+", " ", re.sub(r"\A[\s*-]+", "", text)).strip(" ,;")
