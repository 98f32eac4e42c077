"""Ending what dead runs left on nodes, and writing down that it is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from safelaunch import catalogue, documents, runs
from safelaunch.launch import sweep
from safelaunch.plan import Limits
from safelaunch.transport import choose
from safelaunch.transport.base import Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.console import Console
    from safelaunch.transport.base import Session


def hosts_of(run: runs.Run) -> list[str]:
    """Return the nodes on which something of a run may be left, by its documents."""
    unconfirmed: list[str] | None = run.document("outcome").get("unconfirmed")
    return unconfirmed or [node["name"] for node in run.document("plan").get("nodes", [])]


def is_open(run: runs.Run) -> bool:
    """Tell whether a run has no outcome, or one that says of some nodes that nobody could look there."""
    outcome = run.document("outcome")
    return not outcome or bool(outcome.get("unconfirmed"))


class Cleaning:
    """One sweep over nodes.

    Left alone is a run that has a live launcher here, or an agent with a live connection to one elsewhere.
    """

    def __init__(self, dead: Sequence[runs.Run], console: Console, *, dry_run: bool = False) -> None:
        """Clean up after `dead` runs, or only say what would be ended."""
        self._dead = dead
        self._console = console
        self._dry_run = dry_run
        self._plan = dead[-1].document("plan") if dead else {}
        self._interpreter = self._plan.get("interpreter") or sys.executable
        self._live = [run.run_id for run in runs.all_runs(runs.root(os.environ)) if run.alive()]
        self._clean: set[str] = set()
        self._opened: list[Session] = []
        self._lock = threading.Lock()

    def clean(self, hosts: Sequence[str]) -> int:
        """Sweep the hosts; return 0 if nothing is left on any, else the status of an unfit preflight."""
        names = list(dict.fromkeys(hosts))
        transport = choose.make(
            self._plan.get("transport", "auto"),
            names,
            ssh_port=self._plan.get("ssh_port"),
            fanout=Limits().fanout,
            environ=os.environ,
            home=os.path.expanduser("~"),
        )
        try:
            transport.open(names, self._on_open, timeout=Limits().ssh_timeout)
            with ThreadPoolExecutor(max_workers=Limits().fanout) as pool:
                list(pool.map(self._one, self._opened))
        finally:
            transport.close()
        if not self._clean.issuperset(names):
            return catalogue.PREFLIGHT
        verb = "looked at" if self._dry_run else "clean:"
        self._console.say(f"{verb} {len(names)} node{'s' * (len(names) != 1)}")
        for run in () if self._dry_run else self._dead:
            if self._clean.issuperset(hosts_of(run)):
                _conclude(run)
        return 0

    def _on_open(self, host: str, result: Session | Unreachable) -> None:
        with self._lock:
            if isinstance(result, Unreachable):
                self._console.say(f"{host}: {result.code}: {result.observed}", "bold red")
            else:
                self._opened.append(result)

    def _one(self, session: Session) -> None:
        found = sweep(session, self._interpreter, spare=self._live)
        if found is None:
            self._console.say(f"{session.host}: its processes could not be listed", "bold red")
            return
        connected = {row["run_id"] for row in found["found"] if row.get("connected")}
        left = [row for row in found["found"] if row["run_id"] not in connected]
        for row in left:
            verb = "would end" if self._dry_run else "ending"
            self._console.say(f"{session.host}: {verb} pid {row['pid']} of {row['run_id']}: {row['command']}")
        remaining: list[int] = []
        if left and not self._dry_run:
            ids = sorted({row["run_id"] for row in left})
            after = sweep(session, self._interpreter, only=ids, kill=True)
            remaining = after["survivors"] if after is not None else [row["pid"] for row in left]
        if remaining:
            self._console.say(f"{session.host}: still alive: {', '.join(map(str, remaining))}", "bold red")
        else:
            self._clean.add(session.host)


def _conclude(run: runs.Run) -> None:
    """Write the outcome of a run whose launcher could not do it, or complete the one that it wrote."""
    outcome: dict[str, Any] = run.document("outcome")
    if outcome:
        run.write("outcome", {**outcome, "unconfirmed": []})
        return
    verdict = {
        "status": "interrupted",
        "exit_status": 128 + signal.SIGKILL,
        "summary": "safelaunch itself was killed; `safelaunch clean` made sure that nothing is left",
        "culprit": None,
        "first_failure": None,
        "others": [],
    }
    started = float(run.document("launcher").get("started", time.time()))
    document = documents.outcome_document(
        verdict, run_id=run.run_id, started=started, ended=time.time(), job=None
    )
    run.write("outcome", document)
