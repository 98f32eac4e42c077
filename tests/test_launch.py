"""The lines to agents: what a node that starts, breaks, stays silent or comes back is reported as."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import types

import pytest

from safelaunch import launch
from safelaunch.job import Job, Note
from safelaunch.launch import Link, Links
from safelaunch.plan import Limits, Node, Plan, Program
from safelaunch.supervise import Events, Watch, supervise
from safelaunch.transport.base import ChannelLostError, Unreachable

PING = {"event": "pong", "id": 1, "time": 0}


class FakeChannel:
    """Answers with `messages` and ends; `status` is None where the connection broke."""

    def __init__(self, messages=(), status=None, stderr=b""):
        self._messages, self._status, self._stderr = messages, status, stderr
        self.sent = []
        self._told = threading.Event()

    def send(self, data):
        self.sent.append(data)
        self._told.set()

    def send_eof(self):
        pass

    def lines(self):
        assert self._told.wait(10)
        marker = re.search(rb'"marker": "([^"]+)"', self.sent[0])[1]
        yield b"noise of the shell start-up"
        for message in self._messages:
            yield marker + json.dumps(message).encode()

    def stderr(self):
        return self._stderr

    def wait(self, timeout=None):
        return self._status


class FakeSession:
    def __init__(self, host, channels):
        self.host = host
        self.channels = list(channels)

    def start(self, command):
        if not self.channels:
            raise ChannelLostError("the connection broke")
        return self.channels.pop(0)

    def close(self):
        pass


class FakeTransport:
    """Opens sessions from a list; an empty one is a host that can't be reached."""

    name = "fake"

    def __init__(self, sessions=()):
        self.sessions = list(sessions)
        self.opened = 0

    def open(self, hosts, on_open, *, timeout):
        self.opened += 1
        for host in hosts:
            gone = Unreachable(host=host, code="ssh.refused", observed="no", why="", fix="", seconds=0)
            on_open(host, self.sessions.pop(0) if self.sessions else gone)

    def close(self):
        pass


@pytest.fixture
def events():
    return queue.SimpleQueue()


def link_to(channel, events):
    return Link("a", FakeSession("a", [channel]), lambda *event: events.put(event), "python3")


@pytest.mark.parametrize(
    ("status", "stderr", "error"),
    [
        (1, b"Traceback ...\nOSError: no space left", "Traceback ...\nOSError: no space left"),
        (97, b"", "no Python there"),
        (98, b"", "Python there is older than 3.8"),
        (3, b"", "it exited with status 3"),
    ],
)
def test_an_agent_that_ends_without_a_word_has_failed(events, status, stderr, error):
    link_to(FakeChannel(status=status, stderr=stderr), events).start({})

    assert events.get(timeout=10) == ("agent", "a", {"event": "agent_failed", "error": error})


@pytest.mark.parametrize("status", [None, 255])
def test_a_connection_that_breaks_at_the_start_is_lost(events, status):
    link_to(FakeChannel(status=status, stderr=b"x\nconnection reset by peer\n"), events).start({})

    assert events.get(timeout=10) == ("lost", "a", "connection reset by peer")


def test_a_node_is_back_with_the_first_word_of_its_agent_only(events):
    link = link_to(FakeChannel([{"seq": 1, "event": "one"}]), events)
    link.start({})
    assert [events.get(timeout=10)[0] for _ in range(2)] == ["agent", "lost"]
    assert not link.fruitless
    link.attach(FakeSession("a", [FakeChannel(status=1, stderr=b"no space")]), {})
    assert events.get(timeout=10) == ("lost", "a", "no space")
    assert link.fruitless
    again = FakeChannel([PING, {"seq": 1, "event": "one"}, {"seq": 2, "event": "two"}])
    link.attach(FakeSession("a", [again]), {})

    rows = [events.get(timeout=10) for _ in range(3)]
    assert [row[0] for row in rows] == ["back", "agent", "lost"]
    assert rows[1][2]["event"] == "two"
    assert b'"after": 1' in again.sent[0]


def make_plan(tmp_path, reconnect_grace):
    return Plan(
        nodes=(Node(name="a", slots=(0,), node_rank=0, first_rank=0),),
        cwd=str(tmp_path),
        interpreter="python3",
        program=Program(kind="python", script="t.py", args=(), local_rank=True),
        limits=Limits(reconnect_grace=reconnect_grace, grace=0.1),
    )


def run_job(tmp_path, transport, first, monkeypatch, reconnect_grace=1.5):
    monkeypatch.setattr(launch, "RECONNECT_PAUSE", 0.05)
    plan = make_plan(tmp_path, reconnect_grace)
    job = Job(plan.nodes, grace=0.1, reconnect_grace=reconnect_grace, clock_offsets={}, now=0)
    pending: Events = Events()
    links = Links({"a": first}, transport, plan, "run", lambda *event: pending.put(event))
    notes = []
    try:
        links.start({"a": {}})
        supervise(job, links, pending, output=FakeOutput(), record=notes.append)
    finally:
        links.close()
    return job, [note.event for note in notes]


class FakeOutput:
    def feed(self, *_):
        pass

    def idle(self):
        pass


STARTED = {"seq": 1, "event": "agent_started", "pid": 1, "time": 1}
EXITED = {"seq": 2, "event": "rank_exited", "rank": 0, "pid": 2, "status": 0, "signal": None, "time": 2}
LAUNCHER = {"seq": 3, "event": "launcher_exited", "pid": 3, "status": 0, "signal": None, "time": 3}
FINISHED = {"seq": 4, "event": "finished", "survivors": [], "time": 4}


def test_a_run_goes_on_over_new_connections(tmp_path, monkeypatch):
    sessions = [
        FakeSession("a", [FakeChannel(status=1)]),
        FakeSession("a", []),
        FakeSession("a", [FakeChannel([PING, EXITED, LAUNCHER, FINISHED])]),
    ]
    first = FakeSession("a", [FakeChannel([STARTED])])
    job, notes = run_job(tmp_path, FakeTransport(sessions), first, monkeypatch, reconnect_grace=30)

    assert job.failures == []
    assert job.unconfirmed == ()
    assert notes.count("connection_lost") == notes.count("connection_back") == 1


def test_agents_that_die_after_each_new_connection_end_the_run(tmp_path, monkeypatch):
    endless = FakeTransport(FakeSession("a", [FakeChannel(status=1, stderr=b"killed")]) for _ in range(1000))
    job, _ = run_job(tmp_path, endless, FakeSession("a", [FakeChannel([STARTED])]), monkeypatch)

    assert job.root_cause().reason == "node_unreachable"
    assert "killed" in job.root_cause().text
    assert 2 < endless.opened < 60
    assert job.unconfirmed == ("a",)


def test_agents_hang_up_before_their_connections_are_cut(tmp_path):
    parted, cut = [], []

    class Parting(FakeChannel):
        def lines(self):
            yield from super().lines()
            time.sleep(0.3)
            parted.append(list(cut))

    transport = FakeTransport()
    transport.close = lambda: cut.append(True)
    links = Links(
        {"a": FakeSession("a", [Parting([STARTED])])},
        transport,
        make_plan(tmp_path, 5),
        "run",
        lambda *_: None,
    )
    links.start({"a": {}})
    links.close()

    assert (parted, cut) == ([[]], [True])


def test_nothing_is_concluded_about_ranks_out_of_contact():
    nodes = (Node(name="a", slots=(0,), node_rank=0, first_rank=0),)
    job = Job(nodes, grace=0.1, reconnect_grace=1, clock_offsets={}, now=0)
    hangs = types.SimpleNamespace(tick=lambda _now: ([Note("suspicion")], None))
    watch = Watch(hangs, keep=None, kill=True)
    assert watch.look(job, 0)
    job.lost("a", "closed", 1)

    assert watch.look(job, 1) == []


def test_nothing_is_concluded_while_events_are_unread():
    """A terminal that stood still leaves a backlog behind, and in it what shows that all is well."""
    ticks, now = [], [0.0]

    class Hangs:
        def tick(self, _now):
            ticks.append(pending.empty())
            return [], None

        def printed(self, _rank):
            pass

        def progress(self, _rows, _now):
            pass

        def exited(self, *_):
            pass

    class Slow(FakeOutput):
        def feed(self, *_):
            now[0] += 60.0

    nodes = (Node(name="a", slots=(0,), node_rank=0, first_rank=0),)
    job = Job(nodes, grace=0.1, reconnect_grace=1, clock_offsets={}, now=0)
    pending: Events = Events()
    output = {"event": "output", "rank": 0, "stream": "out", "data": "x"}
    for event in [STARTED, *[output] * 20, {"event": "progress", "ranks": {}}, EXITED, LAUNCHER, FINISHED]:
        pending.put(("agent", "a", {"seq": 1, **event}))
    links = types.SimpleNamespace(processed=lambda *_: None, tell=lambda *_: None)
    watch = Watch(Hangs(), keep=None, kill=True, clock=lambda: now[0])
    supervise(job, links, pending, Slow(), lambda _note: None, watch, clock=lambda: now[0])

    assert job.over
    assert all(ticks)


def test_a_node_that_cannot_be_reached_again_ends_the_run(tmp_path, monkeypatch):
    nowhere = FakeTransport()
    job, _ = run_job(tmp_path, nowhere, FakeSession("a", [FakeChannel([STARTED])]), monkeypatch)

    assert job.root_cause().reason == "node_unreachable"
    assert nowhere.opened > 2


def test_an_agent_that_could_not_start_is_swept(tmp_path, monkeypatch):
    swept = FakeChannel([{"event": "sweep", "found": [], "ended": [], "survivors": []}])
    first = FakeSession("a", [FakeChannel(status=1, stderr=b"boom"), swept])
    job, notes = run_job(tmp_path, FakeTransport(), first, monkeypatch)

    assert job.root_cause().reason == "launcher_died"
    assert "boom" in job.root_cause().text
    assert notes[-1] == "node_swept"
    assert job.unconfirmed == ()
