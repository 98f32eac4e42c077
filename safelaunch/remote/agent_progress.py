"""Part of the agent: what each rank does, from the mark that its hook keeps and from /proc."""

from __future__ import annotations

import json
import os
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote import agent_processes as procs

SAMPLE_SECONDS = 1.0
"""Seconds between two samples of all ranks."""
TICKS = os.sysconf("SC_CLK_TCK")


def load_hook(source: str) -> Any:
    """Return the hook as a module, for the layout of its marks; it does nothing under this name."""
    module = types.ModuleType("rank_hook")
    exec(compile(source, "safelaunch-rank-hook", "exec"), module.__dict__)  # noqa: S102
    return module


class MarkReader:
    """Reads the mark of one rank; `path` is without suffix."""

    def __init__(self, hook: Any, path: str) -> None:
        self.hook = hook
        self.path = path
        self._rows: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any] | None:
        """Return what the mark says, with ages in seconds; None where the rank has no hook (yet)."""
        hook = self.hook
        for base in (self.path + ".joined", self.path):
            try:
                with open(base + ".mark", "rb") as stream:
                    data = stream.read()
            except OSError:
                continue
            if len(data) == hook.SIZE and data.startswith(hook.MAGIC):
                return self._decode(base, data)
        return None

    def _decode(self, base: str, data: bytes) -> dict[str, Any]:
        hook, now = self.hook, time.monotonic_ns()
        _, pid, signum, _ = hook.HEADER.unpack_from(data, 0)
        phase, phase_since = hook.PHASE.unpack_from(data, hook.PHASE_AT)
        steps, step_time = hook.STEP.unpack_from(data, hook.STEP_AT)
        done, number = hook.DONE.unpack_from(data, hook.DONE_AT)
        groups = [self._group(data, index, now) for index in range(number)]
        begun = [
            hook.GROUP[0].unpack_from(data, hook.GROUPS_AT + i * hook.GROUP_SIZE)[1] for i in range(number)
        ]
        return {
            "pid": pid,
            "signal": signum,
            "stacks": base + ".stacks",
            "phase": hook.PHASES[phase],
            "phase_age": (now - phase_since) / 1e9,
            "steps": steps,
            "step_age": (now - step_time) / 1e9 if steps else None,
            # The latest collective has begun, and nobody has waited for it to its end since.
            "inside": max(begun, default=0) > done,
            "groups": self._named(base, groups),
        }

    def _group(self, data: bytes, index: int, now: int) -> dict[str, Any]:
        hook = self.hook
        place = hook.GROUPS_AT + index * hook.GROUP_SIZE
        count, begun, operation, kind, dimensions = hook.GROUP[0].unpack_from(data, place)
        return {
            "count": count,
            "operation": hook.OPERATIONS[operation],
            "type": hook.TYPES[kind],
            "shape": list(hook.GROUP[dimensions].unpack_from(data, place)[5:]),
            "age": (now - begun) / 1e9,
        }

    def _named(self, base: str, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(self._rows) < len(groups):
            try:
                with open(base + ".groups", encoding="utf-8") as stream:
                    self._rows = [json.loads(line) for line in stream if line.endswith("\n")]
            except (OSError, ValueError):
                pass
        names = [{"name": row["name"], "ranks": row["ranks"]} for row in self._rows]
        return [{**group, **name} for group, name in zip(groups, names)]


def usage(process: procs.Process) -> dict[str, Any]:
    """Return state, where it waits in the kernel, and how much CPU (seconds) and I/O (bytes) it has used."""
    found: dict[str, Any] = {"state": process.state.decode(), "cpu": process.cpu / TICKS}
    try:
        with open("/proc/%d/wchan" % process.pid, encoding="ascii") as stream:
            found["wchan"] = stream.read()
    except OSError:
        found["wchan"] = None
    try:
        with open("/proc/%d/io" % process.pid, encoding="ascii") as stream:
            values = dict(line.split(": ") for line in stream)
        found["io"] = int(values["rchar"]) + int(values["wchar"])
    except (OSError, ValueError, KeyError):
        found["io"] = None
    return found
