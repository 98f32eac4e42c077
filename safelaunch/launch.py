"""Starting the agents, and keeping a line open to each: the effects under `supervise`."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from safelaunch.transport import program
from safelaunch.transport.base import ChannelLostError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safelaunch.plan import Node, Plan, Variable
    from safelaunch.transport.base import Channel, Session, Transport

PING_SECONDS = 1.0
"""Between two pings of an agent; each confirms what has arrived."""
RECONNECT_PAUSE = 1.0
"""Seconds between two tries to open a lost node again."""
PARTING_SECONDS = 2.0
"""How long all agents together may take to hang up at the end."""
STATUS_SECONDS = 2.0
"""How long the exit status may come after the end of the output of an agent that did not start."""
SSH_ITSELF = 255
"""The exit status of ssh(1) for troubles of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: what `deepspeed.launcher.launch` gets as --master_addr and --master_port."""

    address: str
    port: int


def heartbeat(reconnect_grace: float) -> float:
    """Return after how many seconds of silence a connection counts as broken, on both sides."""
    return max(2.0, min(10.0, reconnect_grace / 4))


def world_info(nodes: Sequence[Node]) -> str:
    """Return DeepSpeed's map of hosts to device indices: URL-safe base64 of JSON, in rank order."""
    return base64.urlsafe_b64encode(json.dumps({n.name: list(n.slots) for n in nodes}).encode()).decode()


def agent_config(
    plan: Plan, node: Node, meet: Rendezvous, variables: Mapping[str, Variable], run_id: str
) -> dict[str, Any]:
    """Return what the agent of a node is told at its start (docs/reference/node-programs.md)."""
    if plan.program is None:
        raise ValueError("a plan without a program can't be launched")
    local = len(node.slots)
    return {
        "mode": "start",
        "run_id": run_id,
        "host": node.name,
        "node": str(node.node_rank),
        "python": plan.interpreter,
        "launcher_options": [
            f"--world_info={world_info(plan.nodes)}",
            f"--node_rank={node.node_rank}",
            f"--master_addr={meet.address}",
            f"--master_port={meet.port}",
            *([f"--save_pid={os.getpid()}"] if plan.save_pid else []),
            *plan.launcher_options,
        ],
        "program": {
            "argv": [_portable(word) for word in plan.program.command(plan.interpreter)],
            "args": [_portable(argument) for argument in plan.program.args],
            "local_rank": plan.program.local_rank,
        },
        "env": {variable.name: variable.value for variable in variables.values()},
        "unset": list(plan.unset),
        "cwd": plan.cwd,
        "venv_script": plan.venv_script,
        "shim": _remote_source("rank_shim.py"),
        "hook": _remote_source("rank_hook.py"),
        "rank_hook": plan.rank_hook,
        # launch.py's own rule: local rank = rank modulo the number of ranks on the node.
        "ranks": [[rank, rank % local] for rank in node.ranks],
        "grace": plan.limits.grace,
        "reconnect_grace": plan.limits.reconnect_grace,
        "heartbeat": heartbeat(plan.limits.reconnect_grace),
        "rank_log_dir": plan.rank_log_dir,
    }


@functools.cache
def _remote_source(name: str) -> str:
    return resources.files("safelaunch.remote").joinpath(name).read_text(encoding="utf-8")


def _portable(word: str) -> str:
    """Return an argument as UTF-8 with escapes, whatever this machine's locale read it as."""
    return os.fsencode(word).decode("utf-8", "surrogateescape")


class Link:
    """The line to one node's agent: a channel with a reader thread, renewed when it breaks."""

    def __init__(
        self, host: str, session: Session, emit: Callable[[str, str, Any], None], interpreter: str
    ) -> None:
        """Report through `emit(kind, host, value)`: kind is agent, lost."""
        self.host = host
        self.session = session
        self.last_heard = time.monotonic()
        self.arrived = 0
        self.processed = 0
        self._emit = emit
        self._interpreter = interpreter
        self._marker = program.new_marker()
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._attaching = False
        self._spoke = False

    @property
    def fruitless(self) -> bool:
        """Whether the latest connection ended without a word from the agent."""
        return not self._spoke

    def start(self, config: Mapping[str, Any]) -> None:
        """Run the agent program with `config` on the node, and read what it says."""
        self._spoke = False
        try:
            channel = self.session.start(program.command("agent", self._interpreter))
            self._channel = channel
            channel.send(program.payload("agent", {**config, "marker": self._marker}))
        except ChannelLostError as error:
            self._emit("lost", self.host, str(error) or "the connection broke")
            return
        self.last_heard = time.monotonic()
        self._reader = threading.Thread(
            target=self._read, args=(channel,), name=f"link-{self.host}", daemon=True
        )
        self._reader.start()

    def attach(self, session: Session, node: Mapping[str, Any]) -> None:
        """Go on over a new session where the old one broke; `node` names the agent: run id, host, node."""
        self.session = session
        self._attaching = True
        self.start({**node, "mode": "attach", "after": self.arrived})

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send a command; a broken line is noticed by the reader, so it is no error here."""
        with self._sending, contextlib.suppress(ChannelLostError):
            if self._channel is not None:
                self._channel.send(json.dumps({**command, "ack": self.processed}).encode() + b"\n")

    def drop(self) -> None:
        """Give the connection up; the reader reports it as lost."""
        self.session.close()

    def part(self, deadline: float) -> None:
        """Wait until the agent has hung up, which it does on `bye`, but not beyond a monotonic time."""
        if self._reader is not None:
            self._reader.join(timeout=max(0.0, deadline - time.monotonic()))

    def settle(self) -> None:
        """Drop the connection and wait for its reader, so that it can't speak for the next one."""
        self.drop()
        if self._reader is not None:
            self._reader.join(timeout=10)

    def _read(self, channel: Channel) -> None:
        marker = self._marker.encode()
        for line in channel.lines():
            if not line.startswith(marker):
                continue
            try:
                message = json.loads(line[len(marker) :])
            except ValueError:  # cut off by the end of the connection; it comes again
                continue
            self.last_heard = time.monotonic()
            if not self._spoke and self._attaching:
                self._emit("back", self.host, None)
            self._spoke = True
            sequence = message.get("seq")
            if sequence is not None:
                if sequence <= self.arrived:
                    continue
                self.arrived = sequence
            if message["event"] != "pong":
                self._emit("agent", self.host, message)
        if channel is self._channel:
            self._report_end(channel)

    def _report_end(self, channel: Channel) -> None:
        words = channel.stderr().decode(errors="replace").strip()
        status = None if self._spoke or self._attaching else channel.wait(timeout=STATUS_SECONDS)
        if status in (None, SSH_ITSELF):
            self._emit("lost", self.host, words.splitlines()[-1] if words else "the connection was closed")
            return
        known = {program.NO_PYTHON: "no Python there", program.OLD_PYTHON: "Python there is older than 3.8"}
        error = known.get(status) or words or f"it exited with status {status}"
        self._emit("agent", self.host, {"event": "agent_failed", "error": error})


class Links:
    """The lines to all agents of a run."""

    def __init__(
        self,
        sessions: Mapping[str, Session],
        transport: Transport,
        plan: Plan,
        run_id: str,
        emit: Callable[[str, str, Any], None],
    ) -> None:
        """Use the sessions of the preflight; `emit(kind, host, value)` gets agent, lost, back and swept."""
        self._links = {
            host: Link(host, session, emit, plan.interpreter) for host, session in sessions.items()
        }
        self._transport = transport
        self._plan = plan
        self._run_id = run_id
        self._emit = emit
        self._heartbeat = heartbeat(plan.limits.reconnect_grace)
        self._closed = threading.Event()

    def start(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Start every agent, and the pings that keep them."""
        with ThreadPoolExecutor(max_workers=min(len(configs), self._plan.limits.fanout)) as pool:
            for host, config in configs.items():
                pool.submit(self._links[host].start, config)
        threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def tell(self, host: str, command: Mapping[str, Any]) -> None:
        """Send a command to one agent."""
        self._links[host].tell(command)

    def processed(self, host: str, sequence: int) -> None:
        """Note that an event was dealt with, so that its agent may forget it."""
        self._links[host].processed = sequence

    def reconnect(self, host: str) -> None:
        """Try to open a node again until its grace is over, in the background."""
        threading.Thread(target=self._reopen, args=(host,), name=f"reopen-{host}", daemon=True).start()

    def sweep(self, host: str) -> None:
        """End what is left of the run on a node, in the background; reports `swept`."""
        threading.Thread(target=self._sweep, args=(host,), name=f"sweep-{host}", daemon=True).start()

    def close(self) -> None:
        """Stop pinging, let the agents hang up, and drop every connection.

        An agent whose connection is cut before it has read `bye` would wait for us to come back.
        """
        self._closed.set()
        deadline = time.monotonic() + PARTING_SECONDS
        for link in self._links.values():
            link.part(deadline)
        self._transport.close()

    def _ping(self) -> None:
        number = 0
        while not self._closed.wait(PING_SECONDS):
            number += 1
            for link in self._links.values():
                if time.monotonic() - link.last_heard > self._heartbeat:
                    link.last_heard = time.monotonic()
                    link.drop()
                else:
                    link.tell({"do": "ping", "id": number})

    def _reopen(self, host: str) -> None:
        end = time.monotonic() + self._plan.limits.reconnect_grace
        self._links[host].settle()
        if self._links[host].fruitless:
            self._closed.wait(RECONNECT_PAUSE)
        while time.monotonic() < end and not self._closed.is_set():
            session = self._open(host, max(1.0, min(self._plan.limits.ssh_timeout, end - time.monotonic())))
            if session is not None:
                rank = next(node.node_rank for node in self._plan.nodes if node.name == host)
                self._links[host].attach(session, {"run_id": self._run_id, "host": host, "node": str(rank)})
                return
            self._closed.wait(RECONNECT_PAUSE)

    def _open(self, host: str, timeout: float) -> Session | None:
        opened: list[Session] = []

        def on_open(_host: str, result: Session | Unreachable) -> None:
            if not isinstance(result, Unreachable):
                opened.append(result)

        self._transport.open([host], on_open, timeout=timeout)
        return opened[0] if opened else None

    def _sweep(self, host: str) -> None:
        session = self._links[host].session
        found = sweep(
            session, self._plan.interpreter, only=[self._run_id], kill=True, grace=self._plan.limits.grace
        )
        if found is None:
            fresh = self._open(host, self._plan.limits.ssh_timeout)
            if fresh is not None:
                found = sweep(fresh, self._plan.interpreter, only=[self._run_id], kill=True, grace=0)
        self._emit("swept", host, None if found is None else found["survivors"])


def sweep(
    session: Session,
    interpreter: str,
    *,
    only: Sequence[str] | None = None,
    spare: Sequence[str] = (),
    kill: bool = False,
    grace: float = 5.0,
) -> dict[str, Any] | None:
    """List, and with `kill` end, processes of runs on a node; None where the node can't be asked.

    `only` limits it to those run ids, `spare` leaves some out. Returns the `sweep` event of the agent.
    """
    marker = program.new_marker()
    config = {
        "mode": "sweep",
        "marker": marker,
        "host": session.host,
        "only": list(only) if only is not None else None,
        "spare": list(spare),
        "kill": kill,
        "grace": grace,
    }
    try:
        channel = session.start(program.command("agent", interpreter))
        channel.send(program.payload("agent", config))
        channel.send_eof()
        for line in channel.lines():
            if line.startswith(marker.encode()):
                message: dict[str, Any] = json.loads(line[len(marker) :])
                if message.get("event") == "sweep":
                    return message
    except ChannelLostError:
        return None
    return None
