"""How one of our stdlib-only programs gets onto a node: as text on stdin, with nothing installed.

The command is a fixed line that every login shell understands (no newline, no `!`). It finds a Python, and
that reads a length line and so many bytes of source and runs it. What follows on stdin is the program's.
That source is a line which unpacks the program and its parts: compressed, most fit into one packet train of a
fresh connection, and 256 nodes cost a slow uplink a third.
"""

from __future__ import annotations

import functools
import json
import secrets
import shlex
import zlib
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
    """Return what goes to stdin: `remote/<name>.py` behind its length, then one JSON line of config.

    Its parts are the files `remote/<name>_*.py`; the program finds their sources in its global `parts`.
    """
    return packed(name) + json.dumps(config).encode() + b"\n"


@functools.cache
def packed(name: str) -> bytes:
    """Return the program and its parts as they travel."""
    files = [file for file in resources.files("safelaunch.remote").iterdir() if file.name.endswith(".py")]
    parts = sorted((file for file in files if file.name.startswith(f"{name}_")), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name == f"{name}.py"]
    sources += [part.read_bytes() for part in parts]
    body = zlib.compress(b"\0".join(sources), level=9)
    start = (
        f"import zlib;p=zlib.decompress(i.read({len(body)})).split(b'\\0');parts=p[1:];"
        "exec(compile(p[0],sys.argv[1],'exec'))"
    ).encode()
    return b"%d\n%s%s" % (len(start), start, body)
