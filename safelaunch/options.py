"""What an option is, and safelaunch's own options and settings as one table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Union

from safelaunch.findings import Finding, Severity, Where

Kind = Literal["flag", "text", "int", "number", "choice", "count", "list"]
Value = Union[str, int, float, bool, "tuple[str, ...]", None]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_WANTED = {
    "flag": "true or false",
    "int": "a whole number",
    "count": "a whole number",
    "list": "a list of strings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command line, or key of the settings.

    `flags` are its spellings (none: a key of the settings only). `choices` of a `choice` are all its values,
    of a `number` words that may stand in its place. A `list` or `count` adds up when given again.
    """

    dest: str
    flags: tuple[str, ...]
    kind: Kind
    help: str
    default: Value = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    minimum: float | None = None
    unmistakable: bool = False
    """Scripts seldom have an option of this name, so it behind the script is worth a hint."""

    @property
    def takes_value(self) -> bool:
        """Whether a word follows the flag."""
        return self.kind not in ("flag", "count")

    @property
    def spelled(self) -> str:
        """The flag as it stands in messages."""
        return self.flags[-1] if self.flags[0].startswith("--") else self.flags[1]

    def read(self, text: str) -> Value:
        """Return the value that a word of a command line or an environment variable stands for.

        Raises ValueError that says what is wanted instead.
        """
        if self.kind == "flag":
            if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
            raise ValueError("true or false is wanted")
        if self.kind in ("int", "count"):
            return self._number(text, int)
        if self.kind == "number":
            return text if text in self.choices else self._number(text, float)
        if self.kind == "list":
            return tuple(part for part in text.replace(",", " ").split() if part)
        return self._choice(text)

    def accept(self, value: object) -> Value:
        """Return the value of a key in a TOML file; raises ValueError that says what is wanted instead."""
        if self.kind == "flag" and isinstance(value, bool):
            return value
        if self.kind == "list" and isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
        if self.kind in ("int", "count", "number") and isinstance(value, int | float):
            if not isinstance(value, bool) and (self.kind == "number" or isinstance(value, int)):
                return self._bounded(value)
        elif self.kind in ("text", "choice", "number") and isinstance(value, str):
            return self._choice(value)
        raise ValueError(f"{self.wanted} is wanted")

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        words = " or ".join(", ".join(self.choices).rsplit(", ", 1))
        if self.kind == "number":
            return f"{words}, or a number" if words else "a number"
        return words or _WANTED.get(self.kind, "a string")

    def _choice(self, text: str) -> str:
        if (self.choices or self.kind == "number") and text not in self.choices:
            raise ValueError(f"{self.wanted} is wanted")
        return text

    def _number(self, text: str, kind: type[int | float]) -> int | float:
        try:
            return self._bounded(kind(text))
        except (ValueError, OverflowError):
            least = "" if self.minimum is None else f" not under {self.minimum:g}"
            raise ValueError(f"{self.wanted}{least} is wanted") from None

    def _bounded(self, value: float) -> int | float:
        if not math.isfinite(value) or (self.minimum is not None and value < self.minimum):
            raise ValueError(f"{self.wanted} not under {self.minimum or 0:g} is wanted")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOption(Option):
    """An option or setting of safelaunch itself.

    `commands` are the sub-commands that take it. Where this release can't do all that the option can ask for,
    `done` holds the values it can do, `lack` says what happens for others, and those in `refused` are errors.
    `setting` is False for what makes sense on a command line only.
    """

    commands: str = "run check"
    done: frozenset[Value] | None = None
    lack: str = ""
    refused: frozenset[Value] = frozenset()
    setting: bool = True


_EVERYWHERE = "run check ps stop clean explain"
_CONTACT = "run check ps stop clean"

OWN: tuple[OwnOption, ...] = (
    OwnOption(
        dest="preflight",
        flags=("--preflight",),
        kind="choice",
        choices=("off", "quick", "standard", "full"),
        default="standard",
        help="how much to look at before the launch",
        done=frozenset({"off", "quick"}),
        lack="this version's preflight looks at what 'quick' looks at: not through the training interpreter, "
        "and without a test collective",
        unmistakable=True,
    ),
    OwnOption(
        dest="check_only",
        flags=("--check-only",),
        kind="flag",
        default=False,
        help="validate and preflight, start nothing; the same as the check command",
        commands="run check",
        unmistakable=True,
    ),
    OwnOption(
        dest="dry_run",
        flags=("--dry-run",),
        kind="flag",
        default=False,
        help="print what would be started where, or with clean what would be ended",
        commands="run check clean",
    ),
    OwnOption(
        dest="force",
        flags=("--force",),
        kind="flag",
        default=False,
        help="launch in spite of errors found; this is recorded",
    ),
    OwnOption(
        dest="config",
        flags=("--config",),
        kind="text",
        metavar="FILE",
        help="the settings file, in place of safelaunch.toml beside the script or in the current directory",
        commands=_CONTACT,
        setting=False,
    ),
    OwnOption(
        dest="run_dir",
        flags=("--run-dir",),
        kind="text",
        metavar="DIR",
        help="directory that gets this run's documents and logs, in place of one under "
        "~/.local/state/safelaunch/runs",
        unmistakable=True,
    ),
    OwnOption(
        dest="transport",
        flags=("--transport",),
        kind="choice",
        choices=("auto", "ssh", "openssh", "srun", "local"),
        default="auto",
        help="how to reach the nodes",
        commands=_CONTACT,
        done=frozenset({"auto", "ssh", "openssh", "local"}),
        lack="this version has no srun transport; nodes of a Slurm allocation are reached by ssh",
        refused=frozenset({"srun"}),
    ),
    OwnOption(
        dest="ssh_timeout",
        flags=("--ssh-timeout",),
        kind="number",
        metavar="S",
        default=10.0,
        minimum=0.1,
        help="seconds that opening a connection to a node may take",
        commands=_CONTACT,
        unmistakable=True,
    ),
    OwnOption(
        dest="fanout",
        flags=("--fanout",),
        kind="int",
        metavar="N",
        default=64,
        minimum=1,
        help="connections that are negotiated at once",
        commands=_CONTACT,
    ),
    OwnOption(
        dest="hang_timeout",
        flags=("--hang-timeout",),
        kind="number",
        choices=("auto", "off"),
        metavar="{auto,off,S}",
        default="auto",
        minimum=1,
        help="seconds without progress after which a job counts as hung (auto: learnt from the job)",
        unmistakable=True,
    ),
    OwnOption(
        dest="on_hang",
        flags=("--on-hang",),
        kind="choice",
        choices=("kill", "report"),
        default="kill",
        help="what to do with a job that hangs",
        unmistakable=True,
    ),
    OwnOption(
        dest="max_restarts",
        flags=("--max-restarts",),
        kind="int",
        metavar="N",
        default=0,
        minimum=0,
        help="times that a failed job is started again",
        done=frozenset({0}),
        lack="this version does not restart: a job that fails ends",
        unmistakable=True,
    ),
    OwnOption(
        dest="use_spares",
        flags=("--use-spares",),
        kind="flag",
        default=False,
        help="replace an unfit node by one of the hostfile that was not selected",
        done=frozenset({False}),
        lack="this version does not replace nodes: an unfit node refuses the launch",
        unmistakable=True,
    ),
    OwnOption(
        dest="grace",
        flags=("--grace",),
        kind="number",
        metavar="S",
        default=10.0,
        minimum=0,
        help="seconds from SIGTERM to SIGKILL when the job is stopped",
        commands="run check stop clean",
    ),
    OwnOption(
        dest="sync_checks",
        flags=("--sync-checks",),
        kind="choice",
        choices=("off", "on", "strict"),
        default="off",
        help="compare the state of the ranks while they train",
        done=frozenset({"off"}),
        lack="this version does not compare ranks: ones that are out of step go unnoticed",
        unmistakable=True,
    ),
    OwnOption(
        dest="env",
        flags=("--env",),
        kind="list",
        metavar="KEY[=VALUE]",
        help="set a variable for the ranks (without a value: send the launching shell's); may be repeated",
        setting=False,
    ),
    OwnOption(
        dest="no_rank_hook",
        flags=("--no-rank-hook",),
        kind="flag",
        default=False,
        help="load nothing of ours in the ranks; hangs are then seen by CPU and I/O alone",
        unmistakable=True,
    ),
    OwnOption(
        dest="json",
        flags=("--json",),
        kind="flag",
        default=False,
        help="print the result as JSON",
        commands=_EVERYWHERE,
    ),
    OwnOption(
        dest="no_color",
        flags=("--no-color",),
        kind="flag",
        default=False,
        help="no colours on a terminal (also: NO_COLOR)",
        commands=_EVERYWHERE,
    ),
    OwnOption(
        dest="plain",
        flags=("--plain",),
        kind="flag",
        default=False,
        help="neither colours nor moving lines on a terminal",
        commands=_EVERYWHERE,
    ),
    OwnOption(
        dest="verbose",
        flags=("--verbose",),
        kind="count",
        default=0,
        minimum=0,
        help="say more; given twice, with NCCL_DEBUG=INFO and torch's detailed debugging in the ranks",
        commands=_EVERYWHERE,
    ),
    OwnOption(
        dest="show_settings",
        flags=("--show-settings",),
        kind="flag",
        help="print each setting and where its value comes from",
        commands="check",
        setting=False,
        unmistakable=True,
    ),
)
"""Options of the command line; those with `setting` are keys of the settings too."""

KEYS: tuple[OwnOption, ...] = (
    OwnOption(
        dest="keep_runs",
        flags=(),
        kind="int",
        default=50,
        minimum=1,
        help="ended runs that are kept before the oldest go",
    ),
    OwnOption(
        dest="reconnect_grace",
        flags=(),
        kind="number",
        default=60.0,
        minimum=0,
        help="seconds that a node which lost its launcher goes on before it ends its ranks",
    ),
    OwnOption(
        dest="busy_factor",
        flags=(),
        kind="number",
        default=6.0,
        minimum=1,
        help="hang timeouts that a rank which still works may hold up the others",
    ),
    OwnOption(
        dest="interpreter",
        flags=(),
        kind="text",
        help="the Python that runs the training, on every node",
    ),
    OwnOption(
        dest="export",
        flags=(),
        kind="list",
        default=(),
        help="more variables of the launching shell to send to the ranks: names, or prefixes with a `*`",
    ),
    OwnOption(
        dest="checkpoint_dirs",
        flags=(),
        kind="list",
        default=(),
        help="directories that must have room and be writable on every node",
    ),
)
"""Keys of the settings that have no flag."""

SETTINGS: dict[str, OwnOption] = {option.dest: option for option in (*OWN, *KEYS) if option.setting}


def lacking(option: OwnOption, value: Value, named: str, where: Where | None = None) -> Finding | None:
    """Return the cli.not_yet finding for a value that asks for more than this release does, else None."""
    if option.done is None or value in option.done:
        return None
    refused = value in option.refused
    return Finding(
        code="cli.not_yet",
        severity=Severity.ERROR if refused else Severity.WARNING,
        observed=f"{named} asks for what this version of safelaunch does not do",
        why=option.lack,
        fix=f"leave {named} out",
        where=where,
    )
