"""The text of --help, made from the tables of options."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from safelaunch import deepspeed_cli, options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from safelaunch.options import Option

_WIDTH, _INDENT = 100, 30
_USAGE = {
    "run": ("safelaunch [options] SCRIPT [script args]", "start a DeepSpeed job; drop-in for `deepspeed`"),
    "check": ("safelaunch check [options] [SCRIPT ...]", "validate and preflight, start nothing"),
    "ps": ("safelaunch ps [options] [RUN]", "list live runs; with a run, its ranks"),
    "stop": ("safelaunch stop [options] RUN", "stop a run cleanly on all nodes"),
    "clean": ("safelaunch clean [options]", "end what dead runs of yours left on the nodes"),
    "explain": ("safelaunch explain CODE", "what a finding means and how to fix it"),
}
EXIT_STATUSES = (
    ("0", "every rank of every node exited 0, seen by safelaunch, not assumed"),
    ("n", "the first rank that failed exited n; 128+s if signal s killed it"),
    ("2", "the command line alone is wrong"),
    ("69", "the preflight refused: a node did not answer or is not fit, or nodes disagree"),
    ("70", "internal error of safelaunch (traceback in the run directory)"),
    ("74", "contact to a node was lost for good"),
    ("75", "a hang was found and the job stopped; a retry may work"),
    ("76", "the ranks are out of step: in different collectives"),
    ("78", "hostfile, environment file, DeepSpeed config or settings are wrong or disagree"),
    ("130, 143", "stopped by Ctrl-C or SIGTERM, everything cleaned up"),
)
"""Those this release can end with; DESIGN section 3 has them all."""
_RULES = (
    "A script named like a command is written with its path: ./check. --hostfile is taken behind the script "
    "too; a `--` before it leaves it to the script. DeepSpeed's options may be shortened, ours may not."
)


def help_text(command: str = "run") -> str:
    """Return what `--help` prints, for one of the commands or (`run`) for all."""
    whole = command == "run"
    lines = ["usage:", *_rows(_USAGE.values() if whole else [_USAGE[command]], 44)]
    if whole:
        lines += ["", *textwrap.wrap(_RULES, _WIDTH)]
    own = [option for option in options.OWN if command in option.commands.split() or whole]
    lines += ["", "options of safelaunch:", *_options(own)]
    lines += _rows([("-h, --help", "show this text; behind a command, that of the command")])
    lines += _rows([("--version", "show the version")]) if whole else []
    if command in ("run", "check"):
        lines += ["", "options of deepspeed:", *_options(deepspeed_cli.OPTIONS)]
    if whole:
        lines += ["", "exit status:", *_rows(EXIT_STATUSES)]
    return "\n".join(lines)


def _options(table: Iterable[Option]) -> list[str]:
    return _rows((_spelling(option), _described(option)) for option in table)


def _spelling(option: Option) -> str:
    value = option.metavar or "{" + ",".join(option.choices) + "}"
    return ", ".join(option.flags) + (f" {value}" if option.takes_value else "")


def _described(option: Option) -> str:
    notes = []
    if isinstance(option, options.OwnOption):
        if option.kind in ("choice", "number", "int") and option.default is not None:
            notes.append(f"default: {str(option.default).removesuffix('.0')}")
        notes += ["of check only"] if option.commands == "check" else []
        notes += [_served(option)] if option.done is not None else []
    if isinstance(option, deepspeed_cli.DeepSpeedOption):
        notes += [f"since DeepSpeed {option.since}"] if option.since else []
        notes += [f"up to DeepSpeed {option.until}"] if option.until else []
    return option.help + (f" ({'; '.join(notes)})" if notes else "")


def _served(option: options.OwnOption) -> str:
    done = option.done or frozenset()
    if option.kind == "flag" and True in done:
        return "always so in this version"
    served = [choice for choice in option.choices if choice in done]
    return f"this version: {', '.join(served)}" if len(served) > 1 else "not in this version"


def _rows(rows: Iterable[tuple[str, str]], indent: int = _INDENT) -> list[str]:
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, _WIDTH - indent)
        first = f"  {left}".ljust(indent)
        if len(first) > indent:
            lines.append(first)
            first = " " * indent
        lines += [first + wrapped[0], *(" " * indent + line for line in wrapped[1:])]
    return lines
