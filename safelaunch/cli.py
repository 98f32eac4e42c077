"""argv to exit status: the one error boundary, and the only place that exits."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import metadata
from typing import TYPE_CHECKING

from safelaunch import __version__, arguments, catalogue, helptext
from safelaunch.console import Console
from safelaunch.diagnose import INTERNAL
from safelaunch.own_argv import hide_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.arguments import Invocation


def run() -> None:
    """Entry point of the console script; the only sys.exit."""
    hide_values(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    try:
        return _dispatch(arguments.parse(argv, installed=_installed("deepspeed")))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our stdout has gone; a second error at interpreter exit would only add noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # noqa: BLE001 - the boundary: what is not a finding is our own fault
        return _internal_error(error)


def _dispatch(invocation: Invocation) -> int:
    if invocation.command == "version":
        print(f"safelaunch {__version__}")  # noqa: T201 - asked for on stdout
        return 0
    if invocation.command == "help":
        print(helptext.help_text(invocation.topic))  # noqa: T201
        return 0
    if invocation.command in ("run", "check"):
        from safelaunch import running  # noqa: PLC0415 - `--help` needs none of this

        start = running.launch if invocation.command == "run" else running.check
        return start(invocation)
    console = _console(invocation)
    status = catalogue.exit_status(invocation.findings)
    console.findings(invocation.findings)
    if status:
        return status
    from safelaunch import commands  # noqa: PLC0415

    return commands.TABLE[invocation.command](invocation, console)


def _console(invocation: Invocation) -> Console:
    flags = invocation.flags
    plain = bool(flags.get("plain") or flags.get("no_color"))
    return Console(sys.stderr, plain=plain, verbosity=invocation.verbosity)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _internal_error(error: Exception) -> int:
    text = "".join(traceback.format_exception(error))
    path = getattr(error, "run_directory", None)
    place = ""
    if path is not None:
        place = os.path.join(path, "internal-error.txt")
        with open(place, "w", encoding="utf-8") as stream:
            stream.write(text)
        place = f"; traceback in {place}"
    else:
        sys.stderr.write(text)
    sys.stderr.write(f"safelaunch: internal error: {type(error).__name__}: {error}{place}\n")
    return INTERNAL
