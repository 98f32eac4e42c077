"""The run while it lasts: one queue of events, one loop, until every node has said its last word."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safelaunch import job as jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from safelaunch.hang import Hangs
    from safelaunch.launch import Links
    from safelaunch.output import RunOutput

TICK = 0.5
"""Seconds after which the loop looks at the clock although nothing happened."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

Events = queue.SimpleQueue[tuple[str, str, Any]]
"""`(kind, host, value)`: agent, lost, back, swept from the links; `signal` from the handlers."""


@contextlib.contextmanager
def signals_as_events(events: Events) -> Iterator[None]:
    """Turn signals into events as long as the block runs (SimpleQueue.put is safe in a handler)."""

    def put(signum: int, _frame: FrameType | None) -> None:
        events.put(("signal", "", signum))

    # A signal that our parent had us ignore (nohup's SIGHUP) stays ignored.
    wanted = [s for s in (*STOP_SIGNALS, *FORWARDED_SIGNALS) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, put) for signum in wanted}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass(slots=True)
class Watch:
    """Hang detection in a run: `keep` saves a piece of evidence, `kill` says whether a hang ends the job.

    Its clock is not the wall's, which may be set.
    """

    hangs: Hangs
    keep: Callable[[Mapping[str, Any]], None]
    kill: bool
    clock: Callable[[], float] = time.monotonic

    def see(self, message: Mapping[str, Any]) -> None:
        """Take an event of an agent."""
        if message["event"] == "progress":
            self.hangs.progress(message["ranks"], self.clock())
        elif message["event"] == "output" and message["rank"] is not None:
            self.hangs.printed(message["rank"])
        elif message["event"] == "evidence":
            self.hangs.evidence(message)
            self.keep(message)
        elif message["event"] == "rank_exited":
            self.hangs.exited(message["rank"], message["status"], message.get("mark"), self.clock())

    def look(self, job: jobs.Job, now: float) -> list[jobs.Action]:
        """Look at the clock; while a node is out of contact nothing can be said about its ranks."""
        if job.stop_time is not None or any(node.phase == "lost" for node in job.nodes.values()):
            return []
        actions, verdict = self.hangs.tick(self.clock())
        return actions if verdict is None else [*actions, *job.hang(verdict, now, kill=self.kill)]


def supervise(
    job: jobs.Job,
    links: Links,
    events: Events,
    output: RunOutput,
    record: Callable[[jobs.Note], None],
    watch: Watch | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Run the job to its end: feed events to `job`, carry out what it asks for, pass output on."""
    looked = clock()
    while not job.over:
        actions: list[jobs.Action] = []
        with contextlib.suppress(queue.Empty):
            kind, host, value = events.get(timeout=TICK)
            actions = _step(job, kind, host, value, output, clock())
            if kind == "agent" and watch is not None:
                watch.see(value)
            if kind == "agent" and "seq" in value:
                links.processed(host, value["seq"])
        if clock() - looked >= TICK:
            looked = clock()
            output.idle()
            actions += job.tick(looked)
            # What has not been looked at yet, as after a terminal that stood still, may say that all is well.
            if watch is not None and events.empty():
                actions += watch.look(job, looked)
        for action in actions:
            _perform(action, links, record)


def _step(
    job: jobs.Job, kind: str, host: str, value: Any, output: RunOutput, now: float
) -> list[jobs.Action]:
    if kind == "agent":
        message: Mapping[str, Any] = value
        if message["event"] == "output":
            data = message["data"].encode("utf-8", "surrogateescape")
            output.feed(host, message["rank"], message["stream"], data)
            return []
        return job.agent(host, message, now)
    if kind == "lost":
        return job.lost(host, value, now)
    if kind == "back":
        return job.back(host, now)
    if kind == "swept":
        return job.swept(host, value, now)
    if value in FORWARDED_SIGNALS:
        note = jobs.Note("signal_forwarded", fields={"signal": int(value)})
        hosts = [node.host for node in job.nodes.values() if not node.over]
        return [note, *(jobs.Tell(host, {"do": "signal", "signal": int(value)}) for host in hosts)]
    return job.interrupt(int(value), now)


def _perform(action: jobs.Action, links: Links, record: Callable[[jobs.Note], None]) -> None:
    if isinstance(action, jobs.Note):
        record(action)
    elif isinstance(action, jobs.Tell):
        links.tell(action.host, action.command)
    elif isinstance(action, jobs.Reconnect):
        links.reconnect(action.host)
    else:
        links.sweep(action.host)
