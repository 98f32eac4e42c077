"""Part of the agent: the relay, which is the process that a connection started and that dies with it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    from safelaunch.remote import agent_files as files
    from safelaunch.remote import agent_processes as procs
    from safelaunch.remote import agent_talk as talk


class Relay:
    """Copies lines between the launcher (our stdin and stdout) and the agent's socket."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.marker = config["marker"].encode()

    def say(self, line: bytes) -> None:
        data = memoryview(self.marker + line)
        while data:
            data = data[os.write(1, data) :]

    def tell(self, event: str, **fields: Any) -> None:
        self.say(json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n")

    def run(self, directory: str, connection: socket.socket, after: int) -> None:
        """Relay until one side ends; never returns."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, who gives an order then
        threading.Thread(target=self._listen, args=(connection, after), daemon=True).start()
        line = b""
        try:
            for line in connection.makefile("rb"):
                if line != talk.FAREWELL:
                    self.say(line)
        except BrokenPipeError:  # nobody reads us: the connection is gone
            os._exit(0)
        except ConnectionError:
            pass
        # Another relay may have taken over and the farewell got lost.
        if line != talk.FAREWELL and talk.ask(directory) is None:
            self.tell("agent_lost", error="it was killed")
        os._exit(0)  # an ordinary exit would wait for the thread that reads stdin

    def _listen(self, connection: socket.socket, after: int) -> None:
        try:
            connection.sendall(json.dumps({"do": "attach", "after": after}).encode() + b"\n")
            for line in iter(sys.stdin.buffer.readline, b""):
                connection.sendall(line)
        except OSError:
            return  # the other thread sees it too, and knows why
        # Without a launcher there is nothing to relay; the agent notices by the closed socket.
        os._exit(0)


def attach(config: dict[str, Any], relay: Relay, directories: list[str], after: int) -> None:
    """Relay for the agent of a run, or say that there is none and who of the run is left."""
    for directory in directories:
        try:
            connection = files.dial(directory)
        except OSError:
            continue
        relay.run(directory, connection, after)
    left = procs.members(config["run_id"], config["node"], patient=True)
    relay.tell("no_agent", survivors=sorted(left))
