"""How one of our stdlib-only programs gets onto a node: as text on stdin, with nothing installed.

The command is a fixed line that every login shell understands (no newline, no `!`). It finds a Python, and
that reads a length line and so many bytes of source and runs it. What follows on stdin is the program's.
"""

from __future__ import annotations

import json
import secrets
import shlex
from importlib import resources
from typing import Any

NO_PYTHON = 97
"""Exit status of the start line where no Python was found."""
OLD_PYTHON = 98
"""Exit status of the start line where Python is older than 3.8; its version is on stdout then."""

# Inside double quotes of a shell: no double quote, dollar, backtick or backslash may stand in it.
_BOOTSTRAP = (
    "import sys;"
    f"sys.version_info>=(3,8) or (sys.stdout.write(sys.version),sys.exit({OLD_PYTHON}));"
    "i=sys.stdin.buffer;n=int(i.readline());"
    "exec(compile(i.read(n),sys.argv[1],'exec'))"
)


def new_marker() -> str:
    """Return what our output lines begin with, unlike anything a shell start-up prints."""
    return f"sl-{secrets.token_hex(8)} "


def command(name: str, interpreter: str) -> str:
    """Return the shell line that starts a program; `name` is what `ps` and tracebacks show.

    `interpreter` is used where `python3` is not on the node's PATH.
    """
    script = (
        f"p=python3; command -v $p >/dev/null 2>&1 || p={shlex.quote(interpreter)}; "
        f'command -v "$p" >/dev/null 2>&1 || exit {NO_PYTHON}; '
        f'exec "$p" -I -X utf8 -u -c "{_BOOTSTRAP}" safelaunch-{name}'
    )
    return "exec /bin/sh -c " + shlex.quote(script)


def payload(name: str, config: dict[str, Any]) -> bytes:
    """Return what goes to stdin: `remote/<name>.py` behind its length, then one JSON line of config."""
    source = resources.files("safelaunch.remote").joinpath(f"{name}.py").read_bytes()
    return b"%d\n%s%s\n" % (len(source), source, json.dumps(config).encode())
