"""Part of the agent: listing all that belongs to runs on this node, and ending what is asked for."""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote import agent_files as files
    from safelaunch.remote import agent_processes as procs
    from safelaunch.remote import agent_talk as talk

KEEPER_SECONDS = 2.0
"""Beyond the grace, for an agent to end its run before it is killed too."""


class RunHere:
    """What there is of one run on this node."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.keepers: dict[int, procs.Process] = {}  # agents and guardians
        self.directories: list[str] = []

    def members(self) -> dict[int, procs.Process]:
        """Find its processes, without agents and guardians."""
        rows = [row for path in self.directories for row in files.recorded(path).items()]
        return procs.members(
            self.run_id,
            above=set(self.keepers),
            known={key for _, key in rows},
            sessions={key[0] for name, key in rows if name == "launcher"},
            patient=True,
        )

    def connected(self) -> bool:
        """Ask its agents whether a launcher is there."""
        return any((talk.ask(path) or {}).get("connected") for path in self.directories)

    def end(self, grace: float) -> procs.Ending:
        """End it, through its agent or guardian where there is one; that is killed if it takes too long."""
        deadline = time.monotonic() + grace + KEEPER_SECONDS
        for keeper in self.keepers.values():
            procs.send_signal(keeper, signal.SIGTERM)  # to an agent the order to stop; guardians ignore it
        while self._keepers_left() and time.monotonic() < deadline:
            time.sleep(procs.ASKING_PAUSE)
        for keeper in self._keepers_left():
            procs.send_signal(keeper, signal.SIGKILL)
        # What a keeper could not end in its time, has had its grace.
        ending = procs.Ending(self.members, 0 if self.keepers else grace)
        ending.finish()
        for path in () if ending.survivors else self.directories:
            files.remove_directory(path)
        return ending

    def _keepers_left(self) -> list[procs.Process]:
        now = {pid: procs.read(pid) for pid in self.keepers}
        return [row for row in now.values() if row and row.alive and row.key == self.keepers[row.pid].key]


def runs_here() -> dict[str, RunHere]:
    """Find every run of this user that has a process or a directory on this node."""
    found: dict[str, RunHere] = {}

    def run(run_id: str) -> RunHere:
        return found.setdefault(run_id, RunHere(run_id))

    for (run_id, _, _), directory in files.directories().items():
        run(run_id).directories.append(directory)
    for keeper, directory in procs.keepers():
        place, name = os.path.split(directory)
        if os.path.basename(place) == "safelaunch-%d" % os.geteuid():
            run(name.rpartition(".")[0]).keepers[keeper.pid] = keeper
    for pid in procs.read_all():
        try:
            mine = os.stat("/proc/%d" % pid).st_uid == os.geteuid()
        except OSError:
            continue
        for pair in procs.environment(pid) if mine else ():
            variable, _, value = pair.partition(b"=")
            if variable + b"=" == procs.RUN_VARIABLE.encode() and value:
                run(os.fsdecode(value))
    return found


def rows_of(run: RunHere, members: dict[int, procs.Process], connected: bool) -> list[dict[str, Any]]:
    """Describe the processes of a run for the `sweep` event."""
    with open("/proc/stat", encoding="ascii") as stream:
        boot = next(int(line.split()[1]) for line in stream if line.startswith("btime "))
    ticks = os.sysconf("SC_CLK_TCK")
    rows = []
    for pid, process in sorted({**members, **run.keepers}.items()):
        command = procs.command_line(pid).rstrip(b"\0").replace(b"\0", b" ")
        rows.append(
            {
                "run_id": run.run_id,
                "pid": pid,
                "ppid": process.parent,
                "command": command[:400].decode("utf-8", "replace"),
                "started": boot + process.started / ticks,
                "agent": pid in run.keepers,
                "connected": connected,
            }
        )
    return rows


def sweep(config: dict[str, Any]) -> dict[str, Any]:
    """List all that belongs to runs of this user here, and end it if asked to; return the event's fields.

    What has a connected launcher is ended only if `only` names it.
    """
    only, spare = config.get("only"), set(config.get("spare") or ())
    # The launcher that asks may itself carry an id, where it was started from a rank of another run.
    spare.add(os.environ.get(procs.RUN_VARIABLE.rstrip("="), ""))
    found: list[dict[str, Any]] = []
    ended: set[int] = set()
    survivors: list[int] = []
    for run_id, run in sorted(runs_here().items()):
        if run_id in spare or (only is not None and run_id not in only):
            continue
        connected = run.connected()
        rows = rows_of(run, run.members(), connected)
        found += rows
        if config.get("kill") and (only is not None or not connected):
            ending = run.end(config["grace"])
            survivors += ending.survivors
            ended |= ({row["pid"] for row in rows} | ending.ended) - set(ending.survivors)
    return {"found": found, "ended": sorted(ended), "survivors": sorted(survivors)}
