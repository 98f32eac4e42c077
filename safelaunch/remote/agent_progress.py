"""Part of the agent: what each rank does, from the mark that its hook keeps and from /proc."""

from __future__ import annotations

import json
import os
import struct
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote import agent_files as files
    from safelaunch.remote import agent_processes as procs
    from safelaunch.remote import agent_ranks as ranks

SAMPLE_SECONDS = 1.0
"""Seconds between two samples of all ranks."""
TICKS = os.sysconf("SC_CLK_TCK")


def load_hook(source: str) -> Any:
    """Return the hook as a module, for the layout of its marks; under this name it does nothing."""
    module = types.ModuleType("rank_hook")
    exec(compile(source, "safelaunch-rank-hook", "exec"), module.__dict__)  # noqa: S102
    return module


class MarkReader:
    """Reads the mark of one rank; `path` is without suffix.

    Times become wall-clock seconds by an offset that is taken once, so that what
    did not change reads the same.
    """

    def __init__(self, hook: Any, path: str) -> None:
        self.hook = hook
        self.path = path
        self.members: dict[str, list[int]] = {}
        self.base = path
        self._names: list[str] = []
        self._offset = time.time() - time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """Return what the mark says; None where the rank has no hook (yet)."""
        hook = self.hook
        for base in (self.path + ".joined", self.path):
            try:
                with open(base + ".mark", "rb") as stream:
                    data = stream.read()
            except OSError:
                continue
            if len(data) == hook.SIZE and data.startswith(hook.MAGIC):
                self.base = base
                try:
                    return self._decode(data)
                except (struct.error, IndexError):  # whatever wrote that, it was not the hook
                    return None
        return None

    def _time(self, nanoseconds: int) -> float:
        return round(self._offset + nanoseconds / 1e9, 2)

    def _decode(self, data: bytes) -> dict[str, Any]:
        hook = self.hook
        _, pid, signum, _ = hook.HEADER.unpack_from(data, 0)
        phase, since = hook.PHASE.unpack_from(data, hook.PHASE_AT)
        steps, step_time = hook.STEP.unpack_from(data, hook.STEP_AT)
        done, number = hook.DONE.unpack_from(data, hook.DONE_AT)
        self._learn_names(number)
        groups, latest = {}, 0
        for index, name in enumerate(self._names[:number]):
            place = hook.GROUPS_AT + index * hook.GROUP_SIZE
            count, begun, operation, kind, dimensions = hook.GROUP[0].unpack_from(data, place)
            latest = max(latest, begun)
            groups[name] = {
                "count": count,
                "operation": hook.OPERATIONS[operation],
                "type": hook.TYPES[kind],
                "shape": list(hook.GROUP[dimensions].unpack_from(data, place)[5:]),
                "since": self._time(begun),
            }
        return {
            "pid": pid,
            "signal": signum,
            "phase": hook.PHASES[phase],
            "phase_since": self._time(since),
            "steps": steps,
            "step_time": self._time(step_time) if steps else None,
            # The latest collective has begun, and nobody has waited for it to its end since.
            "inside": latest > done,
            "groups": groups,
        }

    def _learn_names(self, number: int) -> None:
        if len(self._names) >= number:
            return
        try:
            with open(self.base + ".groups", encoding="utf-8") as stream:
                rows = [json.loads(line) for line in stream if line.endswith("\n")]
        except (OSError, ValueError):
            return
        self._names = [row["name"] for row in rows]
        self.members = {row["name"]: row["ranks"] for row in rows}


class Watch:
    """Samples the ranks of a node, and tells what has changed."""

    def __init__(self, source: str, directory: str) -> None:
        """Take the source of the hook, and where its marks are."""
        self._hook = load_hook(source)
        self._directory = directory
        self._next = 0.0
        self.readers: dict[int, MarkReader] = {}
        self._told: dict[int, dict[str, Any]] = {}

    def forget(self) -> None:
        """Tell everything again next time, as to a new connection."""
        self._told = {}

    def reader(self, rank: int) -> MarkReader:
        if rank not in self.readers:
            self.readers[rank] = MarkReader(self._hook, os.path.join(self._directory, "rank-%d" % rank))
        return self.readers[rank]

    def last_words(self, rank: int) -> dict[str, Any]:
        """Return what a rank left behind: its mark, and the exception that ended it, if one did."""
        reader = self.reader(rank)
        mark = reader.read()
        return {"mark": mark, "error": files.read_json(reader.base + ".error")}

    def news(self, all_ranks: dict[int, ranks.Rank], now: float) -> dict[int, dict[str, Any]]:
        """Return {rank: what it does} of those with something new; nothing before it is time to look."""
        if now < self._next:
            return {}
        self._next = now + SAMPLE_SECONDS
        found = {}
        for number, rank in all_ranks.items():
            row = self._row(number, rank)
            if row is not None and row != self._told.get(number):
                found[number] = self._told[number] = row
        return found

    def _row(self, number: int, rank: ranks.Rank) -> dict[str, Any] | None:
        process = None if rank.over else rank.process()
        if process is None or not process.alive:
            return None
        reader = self.reader(number)
        mark = reader.read()
        return {**usage(process), "mark": mark, "members": reader.members}


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
