"""The sub-commands that look at runs there already are: ps, stop, clean, explain."""

from __future__ import annotations

import difflib
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from safelaunch import catalogue, cleaning, explain, hostfile, runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from safelaunch.arguments import Invocation
    from safelaunch.console import Console

STOP_WAIT = 30.0
"""Seconds that `stop` waits beyond the run's grace for the launcher to end."""


def ps(invocation: Invocation, console: Console) -> int:
    """List live runs and those whose launcher died; with a run, its ranks."""
    root = runs.root(os.environ)
    if invocation.run is not None:
        try:
            rows = [_describe(runs.find(root, invocation.run), ranks=True)]
        except runs.NoSuchRunError as error:
            console.say(str(error), "bold red")
            return catalogue.USAGE
    else:
        rows = [_describe(run) for run in runs.all_runs(root) if run.alive() or not run.document("outcome")]
    if invocation.flags.get("json"):
        print(json.dumps({"schema": "safelaunch.ps/1", "runs": rows}, indent=2))  # noqa: T201
        return 0
    if not rows:
        console.say(f"no live run in {root}")
    for row in rows:
        print(f"{row['run_id']}  {row['state']}  {row['age_seconds']:.0f} s  {', '.join(row['hosts'])}")  # noqa: T201
        for rank in row.get("ranks", []):
            pid = f"pid {rank['pid']}  " if rank["pid"] is not None else ""
            print(f"  rank {rank['rank']}  {rank['host']}  {pid}{rank['state']}")  # noqa: T201
    return 0


def _describe(run: runs.Run, *, ranks: bool = False) -> dict[str, Any]:
    launcher, outcome = run.document("launcher"), run.document("outcome")
    alive = run.alive()
    state = "running" if alive else outcome.get("status", "launcher died")
    row = {
        "run_id": run.run_id,
        "state": state,
        "path": run.path,
        "launcher": {"host": launcher.get("host"), "pid": launcher.get("pid")},
        "hosts": [node["name"] for node in run.document("plan").get("nodes", [])],
        "age_seconds": outcome.get("seconds") or time.time() - float(launcher.get("started", time.time())),
    }
    if ranks:
        row["ranks"] = _ranks(run)
    return row


def _ranks(run: runs.Run) -> list[dict[str, Any]]:
    """Rebuild the state of each rank from events.jsonl."""
    ranks = {
        rank: {"rank": rank, "host": node["name"], "pid": None, "state": "starting"}
        for node in run.document("plan").get("nodes", [])
        for rank in node["ranks"]
    }
    for event in run.events():
        row = ranks.get(event.get("rank", -1))
        if row is None:
            continue
        if event["event"] == "rank_started":
            row.update(pid=event["pid"], state="running")
        elif event["event"] == "rank_exited":
            how = f"signal {event['signal']}" if event["signal"] else f"status {event['status']}"
            row["state"] = f"exited, {how}"
    return list(ranks.values())


def stop(invocation: Invocation, console: Console) -> int:
    """Ask a run's launcher to end it; where the launcher is dead, end what it left."""
    try:
        run = runs.find(runs.root(os.environ), invocation.run or "")
    except runs.NoSuchRunError as error:
        console.say(str(error), "bold red")
        return catalogue.USAGE
    launcher = run.document("launcher")
    if not run.alive():
        if run.document("outcome"):
            console.say(f"{run.run_id} has ended already")
            return 0
        return cleaning.Cleaning([run], console).clean(cleaning.hosts_of(run))
    if launcher.get("host") != socket.gethostname():
        host = launcher.get("host")
        console.say(f"its launcher runs on {host}: ssh {host} safelaunch stop {run.run_id}")
        return catalogue.PREFLIGHT
    os.kill(int(launcher["pid"]), signal.SIGTERM)
    grace = next((t["seconds"] for t in run.document("plan").get("timeouts", []) if t["name"] == "grace"), 0)
    end = time.monotonic() + grace + STOP_WAIT
    while run.alive():
        if time.monotonic() > end:
            console.say(f"{run.run_id} does not end; see {run.path}", "bold red")
            return catalogue.PREFLIGHT
        time.sleep(0.05)
    console.say(f"{run.run_id}: {run.document('outcome').get('summary', 'ended')}")
    return 0


def clean(invocation: Invocation, console: Console) -> int:
    """End what dead runs of this user left on the nodes."""
    known = [run for run in runs.all_runs(runs.root(os.environ)) if not run.alive() and cleaning.is_open(run)]
    path = invocation.deepspeed.get("hostfile")
    if isinstance(path, str):
        try:
            with open(path, "rb") as stream:
                hosts = [host.name for host in hostfile.parse(stream.read(), path).hosts]
        except OSError as error:
            console.say(f"{path}: {error.strerror}", "bold red")
            return catalogue.CONFIGURATION
    else:
        hosts = [host for run in known for host in cleaning.hosts_of(run)]
    if not hosts:
        console.say(
            "no dead run is known here; name the nodes with --hostfile F to look for runs of other machines"
        )
        return 0
    return cleaning.Cleaning(known, console, dry_run=bool(invocation.flags.get("dry_run"))).clean(hosts)


def explain_code(invocation: Invocation, console: Console) -> int:
    """Print the page of a finding."""
    code = invocation.code or ""
    page = explain.page(code)
    if page is None:
        near = difflib.get_close_matches(code, list(catalogue.CODES), n=3, cutoff=0.4)
        console.say(
            f"no finding is called {code!r}" + (f"; did you mean {', '.join(near)}?" if near else ""),
            "bold red",
        )
        return catalogue.USAGE
    print(page)  # noqa: T201
    return 0


TABLE: dict[str, Callable[[Invocation, Console], int]] = {
    "ps": ps,
    "stop": stop,
    "clean": clean,
    "explain": explain_code,
}
