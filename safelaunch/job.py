"""The state of a running job, and what to do next: a pure step from event to actions.

Times of agents' events are corrected by the clock offsets of the preflight, so they order failures on
different nodes. Nothing here touches a process, a socket or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from safelaunch.plan import Node
    from safelaunch.verdicts import Verdict

STOP_MARGIN = 15.0
"""Seconds an agent may need beyond the grace before its node is swept from outside."""
SWEEP_MARGIN = 45.0
"""Seconds a sweep may take beyond the grace: it may have to open its node again first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: an exit status or a signal; neither where it could not be seen."""

    time: float
    status: int | None = None
    signal: int | None = None
    oom: bool = False

    @property
    def code(self) -> int | None:
        """Exit status as a shell shows it: 128+s for signal s."""
        return 128 + self.signal if self.signal else self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that ends the job; `rank` is None where it is the node's launcher or connection."""

    reason: str
    host: str
    time: float
    rank: int | None = None
    exit: Exit | None = None
    text: str = ""
    verdict: Verdict | None = None


@dataclass(slots=True)
class RankState:
    """What is known of one rank."""

    rank: int
    host: str
    pid: int | None = None
    started: float | None = None
    exit: Exit | None = None


@dataclass(slots=True)
class NodeState:
    """What is known of one node; `phase` is starting, running, lost, sweeping, finished or gone.

    `since` is when the phase began. `confirmed` tells that somebody on the node saw what is left there.
    """

    host: str
    phase: str = "starting"
    since: float = 0.0
    problem: str = ""
    launcher: Exit | None = None
    survivors: tuple[int, ...] = ()
    confirmed: bool = False

    @property
    def over(self) -> bool:
        """Nothing more will come from this node."""
        return self.phase in ("finished", "gone")


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a command to a node's agent."""

    host: str
    command: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Open the node again and attach to its agent."""

    host: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """End whatever is left of the run on a node whose agent can't."""

    host: str


@dataclass(frozen=True, slots=True)
class Note:
    """Put an event into events.jsonl."""

    event: str
    level: str = "info"
    host: str | None = None
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = Tell | Reconnect | Sweep | Note


class Job:
    """The whole job; `agent`, `lost`, `back`, `swept`, `interrupt` and `tick` each return actions."""

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        grace: float,
        reconnect_grace: float,
        clock_offsets: Mapping[str, float],
        now: float,
    ) -> None:
        """Start with every node starting at `now` (seconds, wall clock)."""
        self.nodes: dict[str, NodeState] = {}
        self.ranks: dict[int, RankState] = {}
        for node in nodes:
            self.nodes[node.name] = NodeState(node.name, since=now)
            self.ranks.update({rank: RankState(rank, node.name) for rank in node.ranks})
        self.grace = grace
        self.reconnect_grace = reconnect_grace
        self.clock_offsets = clock_offsets
        self.failures: list[Failure] = []
        self.interrupted: int | None = None
        self.interrupts = 0
        self.stop_time: float | None = None
        self.first_rank_started: float | None = None

    @property
    def over(self) -> bool:
        """Every node has said its last word or was given up."""
        return all(node.over for node in self.nodes.values())

    @property
    def unconfirmed(self) -> tuple[str, ...]:
        """Hosts on which nobody could look whether anything of the run is left."""
        return tuple(node.host for node in self.nodes.values() if node.over and not node.confirmed)

    @property
    def survivors(self) -> dict[str, tuple[int, ...]]:
        """Processes that could not be ended, by host."""
        return {node.host: node.survivors for node in self.nodes.values() if node.survivors}

    def agent(self, host: str, message: Mapping[str, Any], now: float) -> list[Action]:
        """Take an event of a node's agent."""
        handler = getattr(self, f"_on_{message['event']}", None)
        if handler is None:
            return []
        time = float(message.get("time", now)) - self.clock_offsets.get(host, 0.0)
        actions: list[Action] = handler(self.nodes[host], message, time, now)
        return actions

    def _on_agent_started(
        self, node: NodeState, message: Mapping[str, Any], _time: float, _now: float
    ) -> list[Action]:
        node.phase = "running"
        note = Note("agent_started", host=node.host, fields={"pid": message["pid"]})
        # An order to stop that was given while this agent was still starting would otherwise be lost.
        return [note] if self.stop_time is None else [note, self._tell_stop(node.host)]

    def _on_launcher_started(
        self, node: NodeState, message: Mapping[str, Any], _time: float, _now: float
    ) -> list[Action]:
        return [Note("launcher_started", host=node.host, fields={"pid": message["pid"]})]

    def _on_rank_started(
        self, node: NodeState, message: Mapping[str, Any], time: float, _now: float
    ) -> list[Action]:
        rank = self.ranks[message["rank"]]
        rank.pid, rank.started = message["pid"], time
        if self.first_rank_started is None:
            self.first_rank_started = time
        return [Note("rank_started", host=node.host, rank=rank.rank, fields={"pid": rank.pid})]

    def _on_rank_exited(
        self, node: NodeState, message: Mapping[str, Any], time: float, now: float
    ) -> list[Action]:
        rank = self.ranks[message["rank"]]
        rank.exit = _exit(message, time)
        fields = {"pid": rank.pid, "status": rank.exit.status, "signal": rank.exit.signal, "time": time}
        note = Note("rank_exited", "info" if rank.exit.code == 0 else "error", node.host, rank.rank, fields)
        if rank.exit.code in (0, None):
            return [note]
        reason = "oom_killed" if rank.exit.oom else "rank_signalled" if rank.exit.signal else "rank_exited"
        # It failed when it raised; how long it took to end after that says nothing.
        raised = (message.get("error") or {}).get("time")
        if raised is not None and not rank.exit.signal:
            time = min(time, float(raised) - self.clock_offsets.get(node.host, 0.0))
        failure = Failure(reason=reason, host=node.host, time=time, rank=rank.rank, exit=rank.exit)
        return [note, *self._fail(failure, now)]

    def _on_launcher_exited(
        self, node: NodeState, message: Mapping[str, Any], time: float, now: float
    ) -> list[Action]:
        node.launcher = _exit(message, time)
        fields = {"status": node.launcher.status, "signal": node.launcher.signal}
        note = Note("launcher_exited", host=node.host, fields=fields)
        if node.launcher.code == 0:
            return [note]
        # launch.py passes the status of its first failed rank on: that is no failure of its own.
        explained = any(f.host == node.host and f.rank is not None for f in self.failures)
        if explained and not node.launcher.signal:
            return [note]
        failure = Failure(reason="launcher_died", host=node.host, time=time, exit=node.launcher)
        return [note, *self._fail(failure, now)]

    def _on_start_failed(
        self, node: NodeState, message: Mapping[str, Any], time: float, now: float
    ) -> list[Action]:
        failure = Failure(
            reason="launcher_died",
            host=node.host,
            time=time,
            exit=Exit(time=time, status=127),
            text=str(message.get("error", "")),
        )
        note = Note("start_failed", "error", node.host, fields={"error": failure.text})
        return [note, *self._fail(failure, now)]

    def _on_finished(
        self, node: NodeState, message: Mapping[str, Any], _time: float, now: float
    ) -> list[Action]:
        node.phase, node.since, node.confirmed = "finished", now, True
        node.survivors = tuple(message.get("survivors", ()))
        fields = {"survivors": list(node.survivors)}
        level = "error" if node.survivors else "info"
        return [Note("node_finished", level, node.host, fields=fields), Tell(node.host, {"do": "bye"})]

    def _on_no_agent(
        self, node: NodeState, _message: Mapping[str, Any], _time: float, now: float
    ) -> list[Action]:
        text = "its agent was gone when the connection was back"
        return self._agent_gone(node, "node_unreachable", text, now)

    def _on_agent_lost(
        self, node: NodeState, message: Mapping[str, Any], _time: float, now: float
    ) -> list[Action]:
        text = f"safelaunch's agent there died: {_last_line(message)}"
        return self._agent_gone(node, "node_unreachable", text, now)

    def _on_agent_failed(
        self, node: NodeState, message: Mapping[str, Any], _time: float, now: float
    ) -> list[Action]:
        """Take the end of an agent's start on a node that never said a word."""
        text = f"safelaunch's agent could not start there: {_last_line(message)}"
        return self._agent_gone(node, "launcher_died", text, now)

    def _agent_gone(self, node: NodeState, reason: str, text: str, now: float) -> list[Action]:
        if node.over or node.phase == "sweeping":
            return []
        node.phase, node.since = "sweeping", now
        failure = Failure(reason=reason, host=node.host, time=now, text=text)
        note = Note("agent_lost", "error", node.host, fields={"text": text})
        return [note, Sweep(node.host), *self._fail(failure, now)]

    def _on_log_failed(
        self, node: NodeState, message: Mapping[str, Any], _time: float, _now: float
    ) -> list[Action]:
        fields = {"path": message["path"], "error": message["error"]}
        return [Note("log_failed", "warning", node.host, fields=fields)]

    def lost(self, host: str, text: str, now: float) -> list[Action]:
        """Take the end of a node's connection, or its silence; once for each connection."""
        node = self.nodes[host]
        if node.over or node.phase == "sweeping":
            return []
        node.problem = text
        if node.phase == "lost":
            return [Reconnect(host)]
        node.phase, node.since = "lost", now
        return [Note("connection_lost", "warning", host, fields={"text": text}), Reconnect(host)]

    def back(self, host: str, now: float) -> list[Action]:
        """Take the first word of a node's agent over a new connection."""
        node = self.nodes[host]
        if node.phase != "lost":
            return []
        node.phase, node.since = "running", now
        note = Note("connection_back", "info", host)
        return [note] if self.stop_time is None else [note, self._tell_stop(host)]

    def swept(self, host: str, survivors: Iterable[int] | None, now: float) -> list[Action]:
        """Take the end of a sweep: who is still alive, or None where the node could not be asked."""
        node = self.nodes[host]
        node.phase, node.since, node.survivors = "gone", now, tuple(survivors or ())
        node.confirmed = survivors is not None
        fields = {"survivors": list(node.survivors), "asked": node.confirmed}
        return [Note("node_swept", host=host, fields=fields)]

    def interrupt(self, signum: int, now: float) -> list[Action]:
        """Take SIGINT, SIGTERM or SIGHUP; the second ends the grace, the third waits for nobody.

        Agents that hear nothing any more end their ranks themselves.
        """
        self.interrupts += 1
        if self.interrupts == 1:
            self.interrupted = signum
            return self._stop(f"safelaunch got signal {signum}", now)
        self.grace = 0.0
        actions: list[Action] = []
        for node in self.nodes.values():
            if not node.over and (self.interrupts > 2 or node.phase == "lost"):
                node.phase = "gone"
                actions.append(Note("node_given_up", "error", node.host))
            elif not node.over:
                actions.append(self._tell_stop(node.host))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Let time pass: give up nodes that stay away, and agents that do not stop."""
        actions: list[Action] = []
        for node in self.nodes.values():
            if node.over:
                continue
            if node.phase == "sweeping":
                if now - node.since > self.grace + SWEEP_MARGIN:
                    node.phase = "gone"
                    actions.append(Note("node_given_up", "error", node.host))
            elif node.phase == "lost" and now - node.since > self.reconnect_grace:
                node.phase = "gone"
                text = f"no contact for {self.reconnect_grace:g} s ({node.problem})"
                failure = Failure(reason="node_unreachable", host=node.host, time=node.since, text=text)
                actions += [Note("node_lost", "error", node.host), *self._fail(failure, now)]
            elif self._overdue(node, now):
                node.phase, node.since = "sweeping", now
                actions += [Note("agent_stuck", "error", node.host), Sweep(node.host)]
        return actions

    def hang(self, verdict: Verdict, now: float, *, kill: bool) -> list[Action]:
        """Take the verdict that the job stands still."""
        fields = {
            "reason": verdict.reason,
            "ranks": list(verdict.ranks),
            "hosts": list(verdict.hosts),
            "location": verdict.location,
            "text": verdict.text,
            "reasons": list(verdict.votes),
        }
        note = Note("hang", "error", fields=fields)
        if not kill:
            return [note]
        failure = Failure(
            reason=verdict.reason,
            host=verdict.hosts[0] if verdict.hosts else "",
            time=now,
            rank=verdict.ranks[0] if verdict.ranks else None,
            text=verdict.text,
            verdict=verdict,
        )
        return [note, *self._fail(failure, now)]

    def _overdue(self, node: NodeState, now: float) -> bool:
        if self.stop_time is None or node.phase == "lost":
            return False
        return now - max(self.stop_time, node.since) > self.grace + STOP_MARGIN

    def root_cause(self) -> Failure | None:
        """Return the first failure by time among those that were not our own doing.

        Of failures so close that the clocks can't order them, a signal goes before an exit status: a
        rank that is killed makes its peers raise, never the other way round.
        """
        ordered = sorted(self.failures, key=lambda failure: failure.time)
        if not ordered:
            return None
        close = [f for f in ordered if f.time - ordered[0].time <= CLOCK_DOUBT]
        return next((f for f in close if f.exit is not None and f.exit.signal), ordered[0])

    def _fail(self, failure: Failure, now: float) -> list[Action]:
        # What dies after our own order to stop dies of it.
        if self.stop_time is not None and failure.time > self.stop_time:
            return []
        self.failures.append(failure)
        return self._stop(f"{failure.reason} on {failure.host}", now)

    def _stop(self, reason: str, now: float) -> list[Action]:
        if self.stop_time is not None:
            return []
        self.stop_time = now
        note = Note("stopping", fields={"reason": reason, "grace": self.grace})
        return [note, *(self._tell_stop(node.host, reason) for node in self.nodes.values() if not node.over)]

    def _tell_stop(self, host: str, reason: str = "the job is being stopped") -> Tell:
        return Tell(host, {"do": "stop", "grace": self.grace, "reason": reason})


CLOCK_DOUBT = 0.05
"""Seconds within which two failures on different nodes can't be ordered by their clocks."""


def _last_line(message: Mapping[str, Any]) -> str:
    lines = str(message.get("error") or "").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _exit(message: Mapping[str, Any], time: float) -> Exit:
    return Exit(
        time=time, status=message.get("status"), signal=message.get("signal"), oom=bool(message.get("oom"))
    )
