"""Part of the agent: the guardian, which ends a node's part of the run when the agent has died."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote import agent_files as files
    from safelaunch.remote import agent_processes as procs

ENOUGH = b"!"
"""What the agent tells the guardian when it has nothing left to guard."""


def close_all_but(*kept: int) -> None:
    """Close what was inherited: a connection or a listening socket must not outlive its owner."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass


def fork(config: dict[str, Any], directory: str) -> tuple[int, int]:
    """Start another guardian, for an agent that lost its own; return its pid and the pipe to it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            close_all_but(reading)
            os.setsid()
            watch_over(config, directory, reading)
        finally:
            os._exit(1)
    os.close(reading)
    return pid, writing


def watch_over(config: dict[str, Any], directory: str, reading: int) -> None:
    """Wait for the agent's farewell; if it dies without one, end the run. Never returns."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    procs.hide_from_memory_killer()
    if os.read(reading, 1) != ENOUGH:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that orphans vanish when they end
        rows = files.recorded(directory)
        launchers = {key[0] for name, key in rows.items() if name == "launcher"}

        def members() -> dict[int, procs.Process]:
            return procs.members(
                config["run_id"],
                config["node"],
                above=(os.getpid(),),
                known=set(rows.values()),
                sessions=launchers,
            )

        procs.Ending(members, config["grace"]).finish()
        if os.path.samestat(os.stat("."), os.stat(directory)):
            files.remove_directory(directory)
    os._exit(0)
