"""Settings from flags, variables and files to one value, with the origin of each."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from safelaunch import catalogue, deepspeed_cli
from safelaunch.findings import Finding, Severity, Where
from safelaunch.options import SETTINGS, lacking
from safelaunch.plan import Level, Limits, TransportName, Variable
from safelaunch.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from safelaunch.options import Value

PREFIX = "SAFELAUNCH_"
NOT_SETTINGS = frozenset(
    {"SAFELAUNCH_RUN_ID", "SAFELAUNCH_NODE", "SAFELAUNCH_PYTHON", "SAFELAUNCH_RUN_ROOT", "SAFELAUNCH_CONFIG"}
)
"""Variables of ours that are no settings: the run a process belongs to, where runs are kept, --config."""
SEVERITIES = ("error", "warning", "info", "off")
_TABLES = ("checks", "env", "nodes")
_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
_FLAG = "command line"


_DEFAULTS: dict[str, Any] = {key: option.default for key, option in SETTINGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting in force. Times are seconds; the defaults stand in `options`.

    `checks` maps a code or pattern to a severity or "off"; `variables` are those of [env] and [nodes.*.env].
    """

    preflight: Level = _DEFAULTS["preflight"]
    check_only: bool = _DEFAULTS["check_only"]
    dry_run: bool = _DEFAULTS["dry_run"]
    force: bool = _DEFAULTS["force"]
    run_dir: str | None = _DEFAULTS["run_dir"]
    transport: TransportName = _DEFAULTS["transport"]
    ssh_timeout: float = _DEFAULTS["ssh_timeout"]
    fanout: int = _DEFAULTS["fanout"]
    hang_timeout: str | float = _DEFAULTS["hang_timeout"]
    on_hang: str = _DEFAULTS["on_hang"]
    max_restarts: int = _DEFAULTS["max_restarts"]
    use_spares: bool = _DEFAULTS["use_spares"]
    grace: float = _DEFAULTS["grace"]
    sync_checks: str = _DEFAULTS["sync_checks"]
    no_rank_hook: bool = _DEFAULTS["no_rank_hook"]
    json: bool = _DEFAULTS["json"]
    no_color: bool = _DEFAULTS["no_color"]
    plain: bool = _DEFAULTS["plain"]
    verbose: int = _DEFAULTS["verbose"]
    keep_runs: int = _DEFAULTS["keep_runs"]
    reconnect_grace: float = _DEFAULTS["reconnect_grace"]
    busy_factor: float = _DEFAULTS["busy_factor"]
    interpreter: str | None = _DEFAULTS["interpreter"]
    export: tuple[str, ...] = _DEFAULTS["export"]
    checkpoint_dirs: tuple[str, ...] = _DEFAULTS["checkpoint_dirs"]
    checks: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[Variable, ...] = ()

    @property
    def limits(self) -> Limits:
        """Those settings that the transport and the agents get."""
        return Limits(
            ssh_timeout=self.ssh_timeout,
            fanout=self.fanout,
            grace=self.grace,
            reconnect_grace=self.reconnect_grace,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, where each came from (`checks.CODE` for those of [checks]), and what is wrong."""

    settings: Settings
    origins: Mapping[str, str]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """What one file, the environment or the command line says; each value with its origin."""

    values: dict[str, tuple[Value, str, Where | None]] = field(default_factory=dict)
    checks: dict[str, tuple[str, str]] = field(default_factory=dict)
    variables: dict[tuple[str | None, str], Variable] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def load(
    flags: Mapping[str, Value],
    environ: Mapping[str, str],
    *,
    script: str | None,
    cwd: str,
    home: str,
    read: Callable[[str], bytes | None],
) -> Loaded:
    """Merge all sources: flags over variables over the project's file over the user's over defaults.

    `flags` are those given, by dest; `script` is the script's path, None where there is none. `read` returns
    a file's content, None where it does not exist, and raises OSError where it can't be read.
    """
    config = flags.get("config") or environ.get("SAFELAUNCH_CONFIG")
    user = os.path.join(
        environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "safelaunch", "config.toml"
    )
    folders = list(dict.fromkeys([os.path.dirname(os.path.join(cwd, script)) if script else cwd, cwd]))
    project = (
        _file(os.path.join(cwd, str(config)), read, needed=True) if config else _project_file(folders, read)
    )
    sources = [source for source in (_file(user, read), project) if source is not None]
    sources.append(_from_environ(environ))
    sources.append(_Source({key: (value, _FLAG, None) for key, value in flags.items() if key in SETTINGS}))
    values, checks, variables, findings = _merged(sources)
    origins = {key: values[key][1] if key in values else "default" for key in SETTINGS}
    origins |= {f"checks.{code}": origin for code, (_, origin) in checks.items()}
    settings = Settings(
        **cast("dict[str, Any]", {key: value for key, (value, _, _) in values.items()}),
        checks={code: severity for code, (severity, _) in checks.items()},
        variables=tuple(variables.values()),
    )
    if settings.run_dir:
        path = re.sub(r"\A~(?=/|\Z)", lambda _: home, settings.run_dir)
        settings = replace(settings, run_dir=os.path.join(cwd, path))
    return Loaded(settings, origins, tuple(findings))


def show(settings: Settings, origins: Mapping[str, str]) -> str:
    """Return each setting with its origin, as TOML that could stand in a file; no secret is shown."""
    rows = [(f"{key} = {_toml(getattr(settings, key))}", origins[key]) for key in SETTINGS]
    if settings.checks:
        rows += [("", ""), ("[checks]", "")]
        rows += [
            (f"{_toml(code)} = {_toml(s)}", origins[f"checks.{code}"]) for code, s in settings.checks.items()
        ]
    for node in dict.fromkeys(variable.node for variable in settings.variables):
        rows += [("", ""), ("[env]" if node is None else f"[nodes.{_toml(node)}.env]", "")]
        rows += [
            (f"{v.name} = {_toml(redact(v.name, v.value))}", v.origin)
            for v in settings.variables
            if v.node == node
        ]
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"{left.ljust(width)}  # {origin}" if origin else left for left, origin in rows)


def _toml(value: object) -> str:
    if value is None:
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(part) for part in value)}]"
    if isinstance(value, str):
        import json  # noqa: PLC0415 - a JSON string is a TOML string

        return json.dumps(value)
    return str(value).removesuffix(".0")


def _merged(
    sources: list[_Source],
) -> tuple[
    dict[str, tuple[Value, str, Where | None]],
    dict[str, tuple[str, str]],
    dict[tuple[str | None, str], Variable],
    list[Finding],
]:
    values: dict[str, tuple[Value, str, Where | None]] = {}
    checks: dict[str, tuple[str, str]] = {}
    variables: dict[tuple[str | None, str], Variable] = {}
    findings: list[Finding] = []
    for source in sources:
        values |= source.values
        checks |= source.checks
        variables |= source.variables
        findings += source.findings
    for key, (value, origin, where) in values.items():
        if origin != _FLAG:  # those of the command line are judged with it
            lack = lacking(SETTINGS[key], value, f"{key} ({origin})", where)
            findings += [lack] if lack else []
    return values, checks, variables, findings


def _from_environ(environ: Mapping[str, str]) -> _Source:
    source = _Source()
    for name, text in environ.items():
        key = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or name in NOT_SETTINGS:
            continue
        if key not in SETTINGS:
            near = difflib.get_close_matches(key, SETTINGS, n=1)
            source.findings.append(
                _unknown(
                    f"the variable {name}",
                    f"{PREFIX}{near[0].upper()}" if near else "",
                    None,
                    f"unset {name}",
                )
            )
        elif text:
            try:
                source.values[key] = (SETTINGS[key].read(text), name, None)
            except ValueError as error:
                source.findings.append(_wrong(f"the variable {name}", text, str(error), None))
    return source


def _file(path: str, read: Callable[[str], bytes | None], *, needed: bool = False) -> _Source | None:
    """Return what a file says, None where it does not exist and need not."""
    try:
        text = read(path)
    except OSError as error:
        return _Source(findings=[_unreadable(path, error.strerror or str(error))])
    if text is None:
        return _Source(findings=[_unreadable(path, "there is no such file")]) if needed else None
    return _from_file(text, path)


def _project_file(folders: list[str], read: Callable[[str], bytes | None]) -> _Source:
    for folder in folders:
        source = _file(os.path.join(folder, "safelaunch.toml"), read)
        if source is not None:
            return source
    for folder in folders:
        path = os.path.join(folder, "pyproject.toml")
        try:
            text = read(path)
        except OSError:
            continue
        # Someone else's file: what is wrong with it concerns us only if it speaks to us.
        if text is not None and b"safelaunch" in text:
            source = _from_file(text, path, ("tool", "safelaunch"))
            if source != _Source():
                return source
    return _Source()


def _from_file(text: bytes, file: str, root: tuple[str, ...] = ()) -> _Source:
    import tomli  # noqa: PLC0415 - many runs have no settings file

    source = _Source()
    try:
        decoded = text.decode()
        table: Any = tomli.loads(decoded)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        source.findings.append(_unreadable(file, "it is not UTF-8 text", line))
        return source
    except (tomli.TOMLDecodeError, RecursionError) as error:
        source.findings.append(_syntax(file, decoded, str(error)))
        return source
    for name in root:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if table:
        places = {p[len(root) :]: at for p, at in _places(decoded).items() if p[: len(root)] == root}
        _Reader(source, file, places).read(table)
    return source


def _places(text: str) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return line and column of each key of a valid TOML text, by its path.

    Each statement of TOML is valid by itself, so the parser itself finds where one ends.
    """
    import tomli  # noqa: PLC0415

    places: dict[tuple[str, ...], tuple[int, int]] = {}
    prefix: tuple[str, ...] = ()
    statement: list[str] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        statement.append(line)
        try:
            parsed = tomli.loads("\n".join(statement))
        except tomli.TOMLDecodeError:
            continue  # goes on in the next line
        first = statement[0].lstrip()
        at = (number - len(statement) + 1, len(statement[0]) - len(first) + 1)
        header = first.startswith("[")
        paths = list(_paths(parsed))
        for path in paths:
            places[path if header else prefix + path] = at
        if header:
            prefix = paths[-1]
        statement = []
    return places


def _paths(table: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(table, list):  # [[name]]
        table = table[0] if table else {}
    if isinstance(table, dict):
        for key, value in table.items():
            yield (key,)
            yield from ((key, *path) for path in _paths(value))


class _Reader:
    """Reads one parsed settings file into a source."""

    def __init__(self, source: _Source, file: str, places: Mapping[tuple[str, ...], tuple[int, int]]) -> None:
        self._source = source
        self._file = file
        self._places = places

    def read(self, table: object) -> None:
        """Take every key, or note what is wrong with it."""
        for key, value in self._items((), table):
            if key == "checks":
                self._checks(value)
            elif key == "env":
                self._variables(("env",), value, None)
            elif key == "nodes":
                self._nodes(value)
            elif key in SETTINGS:
                try:
                    where = self._where((key,))
                    self._source.values[key] = (SETTINGS[key].accept(value), self._origin(where), where)
                except ValueError as error:
                    self._note(_wrong(key, value, str(error), self._where((key,))))
            else:
                self._unknown((key,), (*SETTINGS, *_TABLES))

    def _checks(self, table: object) -> None:
        for code, severity in self._items(("checks",), table):
            where = self._where(("checks", code))
            pattern = code.endswith("*") and any(known.startswith(code[:-1]) for known in catalogue.CODES)
            if isinstance(severity, dict):  # gpu.hot = "off" without the quotes
                dotted = f'"{code}.{next(iter(severity), "*")}" = "off"'
                self._note(_wrong(f"[checks] {code}", severity, f"a code needs quotes: {dotted}", where))
            elif code not in catalogue.CODES and not pattern:
                self._unknown(("checks", code), catalogue.CODES)
            elif severity not in SEVERITIES:
                self._note(
                    _wrong(f"[checks] {code}", severity, f"one of {', '.join(SEVERITIES)} is wanted", where)
                )
            else:
                self._source.checks[code] = (str(severity), self._origin(where))

    def _nodes(self, table: object) -> None:
        for node, entry in self._items(("nodes",), table):
            for key, value in self._items(("nodes", node), entry):
                if key == "env":
                    self._variables(("nodes", node, "env"), value, node)
                else:
                    self._unknown(("nodes", node, key), ("env",))

    def _variables(self, path: tuple[str, ...], table: object, node: str | None) -> None:
        for name, value in self._items(path, table):
            where = self._where((*path, name))
            if not name or "=" in name or any(c.isspace() or c == "\0" for c in name):
                self._note(_wrong(f"[{'.'.join(path)}]", name, "it is no name for a variable", where))
            elif isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
                shown = type(value).__name__ if not isinstance(value, bool) else value
                self._note(
                    _wrong(f"{name} in [{'.'.join(path)}]", shown, "a string or a number is wanted", where)
                )
            else:
                variable = Variable(name=name, value=str(value), origin=self._origin(where), node=node)
                self._source.variables[node, name] = variable

    def _items(self, path: tuple[str, ...], table: object) -> list[tuple[str, Any]]:
        if isinstance(table, dict):
            return list(table.items())
        self._note(_wrong(".".join(path), table, f"a table is wanted: [{'.'.join(path)}]", self._where(path)))
        return []

    def _unknown(self, path: tuple[str, ...], known: Mapping[str, object] | tuple[str, ...]) -> None:
        near = difflib.get_close_matches(path[-1].replace("-", "_"), known, n=1)
        fix = ""
        if len(path) == 1 and path[0] in deepspeed_cli.BY_DEST:
            fix = f"it is an option of the command line: {deepspeed_cli.BY_DEST[path[0]].spelled}"
        named = f"[{'.'.join(path[:-1])}] {path[-1]}" if path[1:] else path[-1]
        self._note(_unknown(named, near[0] if near and not fix else "", self._where(path), fix))

    def _where(self, path: tuple[str, ...]) -> Where:
        line, column = self._places.get(path, (None, None))
        return Where(self._file, line, column)

    def _origin(self, where: Where) -> str:
        return f"{where.file}:{where.line}" if where.line else where.file

    def _note(self, finding: Finding) -> None:
        self._source.findings.append(finding)


def _unknown(named: str, near: str, where: Where | None, fix: str = "") -> Finding:
    return Finding(
        code="settings.unknown_key",
        severity=Severity.ERROR,
        observed=f"{named} is no setting" + (f"; the nearest is {near}" if near else ""),
        why="nobody reads it, and you may rely on it",
        fix=(fix if fix and not near else near) or "safelaunch check --show-settings lists all",
        where=where,
    )


def _wrong(named: str, value: object, wanted: str, where: Where | None) -> Finding:
    shown = repr(value)
    return Finding(
        code="settings.value",
        severity=Severity.ERROR,
        observed=f"{named} is {shown if len(shown) < 60 else shown[:57] + '...'}: {wanted}",
        why="a value that is not understood is never guessed at",
        fix=f"correct {named}, or take it out",
        where=where,
    )


def _unreadable(file: str, reason: str, line: int | None = None) -> Finding:
    return Finding(
        code="settings.unreadable",
        severity=Severity.ERROR,
        observed=f"{file} can't be read: {reason}",
        why="its settings would be dropped unnoticed",
        fix=f"ls -l {file}",
        where=Where(file, line),
    )


def _syntax(file: str, text: str, message: str) -> Finding:
    match = _PLACE.search(message)
    line, column = (int(match[1]), int(match[2])) if match else (text.count("\n") + 1, 1)
    reason = _PLACE.sub("", message).replace("(at end of document)", "at the end of the file").strip()
    rows = text.split("\n")[line - 1 : line]
    key, equals, _ = rows[0].partition("=") if rows else ("", "", "")  # behind it may be a secret
    return Finding(
        code="settings.syntax",
        severity=Severity.ERROR,
        observed=f"{reason}: {key.strip()}{' = ...' if equals else ''}" if key.strip() else reason,
        why="the file is not valid TOML, so none of its settings is known",
        fix="text needs quotes, and so do the codes of [checks]",
        where=Where(file, line, column),
    )
