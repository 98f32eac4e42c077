"""Keeps secrets of our own command line out of `ps`."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ARG_START, _ARG_END = 48, 49
"""Fields of /proc/self/stat, counted from 1 (proc_pid_stat(5))."""


def hide_values(arguments: Sequence[str]) -> None:
    """Overwrite the values of `--env KEY=VALUE` in this process's memory, where `ps` reads them.

    The kernel shows the bytes between arg_start and arg_end of the process; Python has its own copy. Where
    that can't be done, nothing happens: the value was visible from the start of the process anyway.
    """
    secrets = [value for value in _values(arguments) if value]
    if not secrets:
        return
    import ctypes  # noqa: PLC0415 - only a command line with a secret pays for it

    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
        if not 0 < start < end:
            return
        memory = ctypes.string_at(start, end - start)
        for secret in secrets:
            raw = b"=" + secret.encode("utf-8", "surrogateescape") + b"\0"
            position = memory.find(raw)
            while position >= 0:
                ctypes.memset(start + position + 1, ord("*"), len(raw) - 2)
                position = memory.find(raw, position + 1)


def _values(arguments: Sequence[str]) -> list[str]:
    given = [after for before, after in pairwise(arguments) if before == "--env"]
    given += [argument.partition("=")[2] for argument in arguments if argument.startswith("--env=")]
    return [value.partition("=")[2] for value in given]
