"""`safelaunch clean` over made-up nodes: what is ended, what is left alone, and what is written down then."""

from __future__ import annotations

import io

import pytest

from safelaunch import cleaning, documents, runs
from safelaunch.console import Console
from safelaunch.transport.base import Unreachable

VERDICT = {
    "status": "node_lost",
    "exit_status": 74,
    "summary": "contact to node b was lost",
    "culprit": None,
    "first_failure": None,
    "others": [],
}


class Nodes:
    """Stands in for transport and sweep: what runs where, by host and run id."""

    def __init__(self, **processes):
        self.processes = processes
        self.connected = set()
        self.immortal = set()
        self.away = set()
        self.dumb = set()

    def make(self, *_, **__):
        return self

    def open(self, hosts, on_open, *, timeout):
        for host in hosts:
            gone = Unreachable(host=host, code="ssh.refused", observed="no", why="", fix="", seconds=0)
            on_open(host, gone if host in self.away else type("Session", (), {"host": host})())

    def close(self):
        pass

    def sweep(self, session, _interpreter, *, only=None, spare=(), kill=False):
        if session.host in self.dumb:
            return None
        here = self.processes.get(session.host, {})
        wanted = [run for run in here if run not in spare and (only is None or run in only)]
        found = [
            {"run_id": run, "pid": here[run], "command": "python t.py", "connected": run in self.connected}
            for run in wanted
        ]
        if not kill:
            return {"found": found, "survivors": []}
        survivors = [here[run] for run in wanted if run in self.immortal]
        self.processes[session.host] = {
            run: pid for run, pid in here.items() if run not in wanted or pid in survivors
        }
        return {"found": found, "survivors": survivors}


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Clean up after a dead run on nodes a and b; returns status, what was said, and the run."""
    monkeypatch.setenv("SAFELAUNCH_RUN_ROOT", str(tmp_path / "runs"))

    def run(nodes, *, outcome=None, dry_run=False):
        monkeypatch.setattr(cleaning.choose, "make", nodes.make)
        monkeypatch.setattr(cleaning, "sweep", nodes.sweep)
        dead, lock = runs.create(str(tmp_path / "runs"), "t.py", None)
        lock.close()
        dead.write("plan", {"nodes": [{"name": "a"}, {"name": "b"}], "interpreter": "python3"})
        if outcome is not None:
            dead.write("outcome", outcome)
        said = io.StringIO()
        assert cleaning.is_open(dead)
        hosts = cleaning.hosts_of(dead)
        status = cleaning.Cleaning([dead], Console(said, plain=True, verbosity=0), dry_run=dry_run).clean(
            hosts
        )
        return status, said.getvalue(), dead

    return run


def test_what_is_left_is_ended_and_the_run_concluded(clean):
    nodes = Nodes(a={"x": 1}, b={"x": 2})
    status, said, dead = clean(nodes)

    assert (status, nodes.processes) == (0, {"a": {}, "b": {}})
    assert "a: ending pid 1 of x: python t.py" in said
    assert dead.document("outcome")["status"] == "interrupted"
    assert not cleaning.is_open(dead)


def test_a_run_with_a_launcher_elsewhere_is_left_alone(clean):
    nodes = Nodes(a={"x": 1, "theirs": 7})
    nodes.connected = {"theirs"}
    status, said, _ = clean(nodes)

    assert (status, nodes.processes["a"]) == (0, {"theirs": 7})
    assert "pid 7" not in said


@pytest.mark.parametrize("trouble", ["immortal", "away", "dumb"])
def test_nothing_is_called_clean_that_was_not_seen_to_be(clean, trouble):
    nodes = Nodes(a={"x": 1}, b={"x": 2})
    setattr(nodes, trouble, {"immortal": {"x"}, "away": {"b"}, "dumb": {"b"}}[trouble])
    status, said, dead = clean(nodes)

    assert status == 69
    assert {"immortal": "still alive: 2", "away": "b: ssh.refused", "dumb": "b: its processes"}[
        trouble
    ] in said
    assert dead.document("outcome") == {}


def test_a_dry_run_ends_nothing(clean):
    nodes = Nodes(a={"x": 1})
    status, said, dead = clean(nodes, dry_run=True)

    assert (status, nodes.processes) == (0, {"a": {"x": 1}})
    assert "would end pid 1" in said
    assert cleaning.is_open(dead)


def test_a_run_of_which_a_node_was_not_seen_is_completed(clean):
    outcome = documents.outcome_document(VERDICT, run_id="x", started=1.0, ended=2.0, job=None)
    nodes = Nodes(b={"x": 2})
    status, said, dead = clean(nodes, outcome={**outcome, "unconfirmed": ["b"]})

    assert status == 0
    assert "clean: 1 node" in said
    assert dead.document("outcome") == {**outcome, "unconfirmed": []}
    assert not cleaning.is_open(dead)
