"""DeepSpeed's `.deepspeed_env`: bytes to variables and findings. No finding shows a value that may be secret.

Stock `deepspeed` puts each value between double quotes of a shell line where it holds anything unusual, so a
pair of double quotes in the file disappears again and `$NAME` is replaced (with pdsh; other launchers keep
both as text). That is what people's files rely on, and what is done here, without a shell.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safelaunch.findings import Finding, Severity, Where
from safelaunch.hostnames import describe, show
from safelaunch.plan import Variable
from safelaunch.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_REFERENCE = re.compile(r"\\\$|\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
_RUNS_SOMETHING = re.compile(r"`|\$\(|\$\{")
_NAMES_SHOWN = 8


@dataclass(slots=True)
class _Reader:
    file: str
    environ: Mapping[str, str] | None
    variables: dict[str, Variable] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def say(
        self,
        severity: Severity,
        place: tuple[int, int],
        observed: str,
        why: str,
        fix: str,
        kind: str = "syntax",
    ) -> None:
        """Add a finding; `place` is line and offset from 0."""
        line, offset = place
        self.findings.append(
            Finding(
                code=f"env_file.{kind}",
                severity=severity,
                observed=observed,
                why=why,
                fix=fix,
                where=Where(self.file, line, offset + 1),
            )
        )


def env_file_paths(environ: Mapping[str, str], cwd: str, home: str) -> list[tuple[str, bool]]:
    """Return where stock deepspeed looks for an environment file, the later one winning.

    Each comes with whether DS_ENV_FILE names it: that one of these exists is then expected.
    """
    explicit = "DS_ENV_FILE" in environ
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    if not name:
        return []
    paths = dict.fromkeys(os.path.join(directory, name) for directory in (home, cwd))
    return [(path, explicit) for path in paths]


def parse_env_file(
    text: bytes, file: str, environ: Mapping[str, str] | None = None
) -> tuple[tuple[Variable, ...], tuple[Finding, ...]]:
    """Read an environment file; of a name given twice the last value is returned.

    `$NAME` and `${NAME}` are replaced from the lines above and then from `environ`, the launching shell's;
    without `environ` they stay as they are, with a warning.
    """
    reader = _Reader(file, environ)
    decoded = text.decode("utf-8", "surrogateescape")
    # Universal newlines, as deepspeed opens the file.
    for number, line in enumerate(re.split(r"\r\n|\r|\n", decoded), 1):
        if number == 1 and line.startswith("\ufeff"):
            why = "deepspeed makes it part of the first name"
            fix = "save the file as UTF-8 without a byte order mark"
            reader.say(Severity.WARNING, (1, 0), "the file begins with a byte order mark", why, fix)
            line = " " + line[1:]  # noqa: PLW2901 - the columns of what follows stay right
        if line.strip() and not line.lstrip().startswith("#"):
            _read_line(reader, number, line)
    _say_duplicates(reader)
    return tuple(reader.variables.values()), tuple(reader.findings)


def _read_line(reader: _Reader, number: int, line: str) -> None:
    start = len(line) - len(line.lstrip())
    unusable = re.search("[\x00\udc80-\udcff]", line)
    if unusable:
        bad = unusable[0]
        reader.say(
            Severity.ERROR,
            (number, unusable.start()),
            f"{describe(bad)} on line {number}",
            "no variable can hold it" if bad == "\x00" else "deepspeed can't read the file",
            "write the value as UTF-8 text, or put `#` in front of the line",
        )
        return
    left, equals, right = line.partition("=")
    if not equals:
        _say_no_equals(reader, number, line)
        return
    name = left.split()[-1] if left.split() else ""
    if not name:
        why = "the line must begin with the name of a variable"
        fix = "NAME=VALUE, or put `#` in front of the line"
        reader.say(Severity.ERROR, (number, start), "no name stands in front of `=`", why, fix)
        return
    value = right.strip()
    offset = len(left) + 1 + len(right) - len(right.lstrip())
    _say_comment(reader, (number, offset), name, value)
    value = _unquoted(reader, (number, offset), name, value)
    _say_odd_name(reader, number, line, name, value)
    reader.lines.setdefault(name, []).append(number)
    reader.variables[name] = Variable(name=name, value=value, origin=f"{reader.file}:{number}")


def _say_no_equals(reader: _Reader, number: int, line: str) -> None:
    words = line.split()
    names = [word for word in words[:-1] if _IDENTIFIER.fullmatch(word.rstrip(":")) and word.isupper()]
    if words[0] in ("export", "set", "setenv", "declare", "-x"):
        names = [name for name in names if name != words[0]]
    # A line that is no assignment may be a piece of a key or a password, so only a plain name is shown.
    fix = "NAME=VALUE, or put `#` in front of the line"
    offset = len(line.rstrip())
    if names:
        name = names[0].rstrip(":")
        offset = line.index(name) + len(name)
        fix = f"{name}={redact(name, line[offset:].lstrip(' :').strip())}"
    why = "deepspeed stops with an unpacking error that names neither file nor line"
    reader.say(Severity.ERROR, (number, offset), f"line {number} has no `=`", why, fix)


def _say_odd_name(reader: _Reader, number: int, line: str, name: str, value: str) -> None:
    start = len(line) - len(line.lstrip())
    first = line.split(None, 1)[0]
    left = line.partition("=")[0]
    offset = left.rstrip().rindex(name)
    if len(left.split()) > 1:
        observed = (
            f"`{first}` in front of the name"
            if first in ("export", "declare", "set")
            else "a blank in the name"
        )
        why = "stock deepspeed gets this right with the pdsh launcher alone; a line is NAME=VALUE"
        reader.say(Severity.WARNING, (number, start), observed, why, f"{show(name)}={redact(name, value)}")
    elif not _IDENTIFIER.fullmatch(name):
        odd = next((i for i, c in enumerate(name) if not _IDENTIFIER.fullmatch("_" + c)), 0)
        observed = f"{describe(name[odd])} in the name of a variable"
        why = (
            "shells refuse such a name: ranks get it from safelaunch, but not from stock deepspeed with pdsh"
        )
        fix = "a name of letters, digits and `_`, or put `#` in front of the line"
        reader.say(Severity.WARNING, (number, offset + odd), observed, why, fix)


def _say_comment(reader: _Reader, place: tuple[int, int], name: str, value: str) -> None:
    match = re.search(r"\s+#", value)
    quoted = value[:1] in ("'", '"') and value[:1] == value[-1:]
    if match and not quoted:
        reader.say(
            Severity.WARNING,
            (place[0], place[1] + match.end() - 1),
            f"a comment behind the value of {show(name)}",
            "deepspeed, and so safelaunch, makes it part of the value; comments have their own lines",
            f"{show(name)}={redact(name, value[: match.start()])}",
        )


def _unquoted(reader: _Reader, place: tuple[int, int], name: str, value: str) -> str:
    """Return the value without a pair of quotes around it, with what it refers to replaced."""
    quote = value[:1] if value[:1] in ("'", '"') else ""
    inner = value[1:-1]
    if quote and len(value) > 1 and value.endswith(quote) and quote not in inner:
        shown = redact(name, inner)
        reader.say(
            Severity.WARNING,
            place,
            f"the value of {show(name)} stands in quotes",
            "safelaunch takes them off; stock deepspeed makes "
            + (
                "them part of the value"
                if quote == "'"
                else "them part of the value with every launcher but pdsh"
            ),
            f"{show(name)}={shown}",
            "quotes",
        )
        return inner if quote == "'" else _replaced(reader, (place[0], place[1] + 1), name, inner)
    lonely = quote or (value[-1:] if value[-1:] in ("'", '"') else "")
    if lonely and (value.count(lonely) % 2 or quote):
        reader.say(
            Severity.WARNING,
            place if quote else (place[0], place[1] + len(value) - 1),
            f"a quote at one end of the value of {show(name)}",
            "it becomes part of the value",
            f"{show(name)}={redact(name, value.strip(lonely))}",
            "quotes",
        )
    return _replaced(reader, place, name, value)


def _replaced(reader: _Reader, place: tuple[int, int], name: str, value: str) -> str:
    number, offset = place
    environ = reader.environ

    def one(match: re.Match[str]) -> str:
        wanted = match[1] or match[2]
        if wanted is None:
            return "$"
        if environ is None:
            return match[0]
        known = reader.variables.get(wanted)
        if known is None and wanted not in environ:
            # The text behind `$` may be a piece of a password, so it is not shown.
            reader.say(
                Severity.WARNING,
                (number, offset + match.start()),
                f"the value of {show(name)} refers to a variable that is not set",
                "it is replaced by nothing, as a shell would do",
                rf"set the variable in the launching shell, or write `\$` for a plain `$` in {show(name)}",
            )
            return ""
        return known.value if known else environ[wanted]

    result = _REFERENCE.sub(one, value)
    left = _RUNS_SOMETHING.search(_REFERENCE.sub(lambda match: " " * len(match[0]), value))
    kept = next((m for m in _REFERENCE.finditer(value) if m[0] != r"\$"), None) if environ is None else None
    if left or kept:
        at = left.start() if left else kept.start() if kept else 0
        reader.say(
            Severity.WARNING,
            (number, offset + at),
            f"{describe(value[at])} in the value of {show(name)} stays as it is",
            "a shell would replace it: stock deepspeed with pdsh lets the node's shell do that"
            if kept
            else "nothing is run to find a value, and only $NAME and ${NAME} are replaced",
            f"{show(name)}= the value itself",
        )
    return result


def _say_duplicates(reader: _Reader) -> None:
    again = {name: lines for name, lines in reader.lines.items() if len(lines) > 1}
    if not again:
        return
    told = [f"{show(name)} (lines {', '.join(map(str, lines))})" for name, lines in again.items()]
    more = f" and {len(told) - _NAMES_SHOWN} more" if len(told) > _NAMES_SHOWN else ""
    first = min(lines[1] for lines in again.values())
    reader.say(
        Severity.INFO,
        (first, 0),
        f"given more than once: {', '.join(told[:_NAMES_SHOWN])}{more}",
        "the last value wins, as with deepspeed",
        "keep one line for each name",
        "duplicate",
    )
