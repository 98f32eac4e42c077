"""The test bed for tests: scripts/testbed as a value, and safelaunch run in its head's view."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "scripts/testbed")]
BIN = str(Path(sys.executable).parent)
NOBODY_LEFT = 10.0
"""Seconds after a test in which the last processes of a run may still be on their way out."""


@dataclass(frozen=True)
class Survivor:
    """A process of a run: its pid on this machine, where it is (`head` or a node), and its command."""

    pid: int
    place: str
    run_id: str
    command: str


class Bed:
    """A running test bed. Node numbers count from 1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shared = directory / "shared"
        """The same directory on every node and on the head."""

    def tool(self, *arguments: str | int, timeout: float = 120, env: dict[str, str] | None = None) -> str:
        """Run scripts/testbed on this bed and return its stdout."""
        command = [*TOOL, "--dir", str(self.directory), *map(str, arguments)]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env=env,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self.tool("status", "--json"))

    def address(self, node: int) -> str:
        return self.status["nodes"][node - 1]["address"]

    def fault(self, name: str, node: int, *arguments: str | int) -> None:
        """Make something go wrong on a node; the `bed` fixture heals all nodes after each test."""
        self.tool("fault", name, node, *arguments)

    def heal(self, *nodes: int) -> None:
        self.tool("heal", *nodes)

    def sh(self, node: int, *argv: str, timeout: float = 60, env: dict[str, str] | None = None) -> str:
        """Run a command inside a node and return its stdout."""
        return self.tool("sh", node, *argv, timeout=timeout, env=env)

    def head(
        self, *argv: str, timeout: float = 60, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the cluster's user and return how it ended."""
        command = [*TOOL, "--dir", str(self.directory), "head", *argv]
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or self.shared,
            stdin=subprocess.DEVNULL,
            env=user_environment(),
        )

    def processes(self, node: int) -> dict[int, str]:
        """Return the commands of all processes of a node, by their pid on this machine."""
        place = namespace(self.status["nodes"][node - 1]["pid"])
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return {pid: command(pid) for pid in pids if namespace(pid) == place}

    def pid(self, node: int, text: str) -> int:
        """Return the first process of a node whose command contains a text."""
        found = sorted(pid for pid, command in self.processes(node).items() if text in command)
        assert found, f"nothing on node{node} has {text!r} in its command: {self.processes(node)}"
        return found[0]

    def survivors(self, run_id: str | None = None) -> list[Survivor]:
        """Return the processes of a run, or of any: all that are on the nodes, and ours on the head."""
        places = {}
        for node in self.status["nodes"]:
            if node["pid"]:
                places[namespace(node["pid"])] = node["name"]
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            environment = _environment(pid)
            run = environment.get("SAFELAUNCH_RUN_ID")
            if run is None and "safelaunch-agent" in command(pid):
                run = "an agent or its guardian"
            place = places.get(namespace(pid))
            if place is None and environment.get("TESTBED_DIR") == str(self.directory):
                place = "head"
            if run is not None and place is not None and run_id in (None, run):
                found.append(Survivor(pid, place, run, command(pid)))
        return found

    def wait_until_nobody_is_left(self, seconds: float, run_id: str | None = None) -> list[Survivor]:
        """Return who is left of a run after at most so many seconds: an empty list is what is hoped for."""
        deadline = time.monotonic() + seconds
        while (left := self.survivors(run_id)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@dataclass(frozen=True)
class Result:
    """How a command of safelaunch ended. `run_dir` is its run directory, or None where it made none."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    run_dir: Path | None

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON document of the run directory (`outcome`, `preflight`, `plan`)."""
        assert self.run_dir is not None, f"no run directory was made:\n{self.stderr}"
        return json.loads((self.run_dir / f"{name}.json").read_text(encoding="utf-8"))

    @property
    def outcome(self) -> dict[str, Any]:
        return self.document("outcome")

    @property
    def events(self) -> list[dict[str, Any]]:
        assert self.run_dir is not None, f"no run directory was made:\n{self.stderr}"
        lines = (self.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def log(self, rank: int, stream: str = "out") -> str:
        """Return what one rank has written."""
        assert self.run_dir is not None, f"no run directory was made:\n{self.stderr}"
        return (self.run_dir / f"logs/rank-{rank}.{stream}").read_text(
            encoding="utf-8", errors="surrogateescape"
        )


class Running:
    """A command of safelaunch that has been started; `pid` is its own, so a signal reaches it alone."""

    def __init__(self, process: subprocess.Popen[bytes], files: tuple[Path, Path], runs: Path) -> None:
        self._process = process
        self._files = files
        self._runs = runs
        self._started = time.monotonic()
        self.pid = process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def run_dir(self) -> Path | None:
        """The run directory that this command has made."""
        for path in _run_directories(self._runs):
            with contextlib.suppress(OSError, ValueError):
                if json.loads((path / "launcher.json").read_text(encoding="utf-8"))["pid"] == self.pid:
                    return path
        return None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """What stands on stdout and stderr so far."""
        return "".join(file.read_text(encoding="utf-8", errors="surrogateescape") for file in self._files)

    def wait_for_output(self, text: str, seconds: float = 60, count: int = 1) -> None:
        """Return when a text has been printed so many times; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.output().count(text) < count:
            assert time.monotonic() < deadline, f"{text!r} was not printed in {seconds} s:\n{self.output()}"
            assert self.alive or self.output().count(text) >= count, f"it ended without it:\n{self.output()}"
            time.sleep(0.05)

    def wait_for_event(self, seconds: float = 60, **fields: Any) -> dict[str, Any]:
        """Return the first event of the run with these fields; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            assert time.monotonic() < deadline, f"no event {fields} in {seconds} s:\n{self.output()}"
            path = self.run_dir / "events.jsonl" if self.run_dir is not None else None
            rows = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
            for row in rows:
                event = json.loads(row)
                if all(event.get(name) == value for name, value in fields.items()):
                    return event
            time.sleep(0.05)

    def wait(self, timeout: float = 90) -> Result:
        """Wait for the end; what is late is stopped, and the test fails with what it has printed."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"not done after {timeout} s:\n{self.output()}") from None
        out, err = (file.read_text(encoding="utf-8", errors="surrogateescape") for file in self._files)
        return Result(status, out, err, time.monotonic() - self._started, self.run_dir)

    def stop(self) -> None:
        """End it, the hard way if need be."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            if self._process.poll() is not None:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


class SafeLaunch:
    """Runs safelaunch as the cluster's user: this venv's, in a directory that all nodes see."""

    def __init__(self, bed: Bed, cwd: Path) -> None:
        self.bed = bed
        self.cwd = cwd
        self.runs = cwd / "runs"
        self._all: list[Running] = []

    def write(self, name: str, text: str) -> Path:
        """Write a file into the working directory."""
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def start(self, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Running:
        """Start `safelaunch ARGUMENTS` and return at once."""
        files = tuple(self.cwd / f".{name}-{len(self._all)}" for name in ("stdout", "stderr"))
        command = [*TOOL, "--dir", str(self.bed.directory), "head", f"{BIN}/safelaunch", *arguments]
        environment = {**user_environment(), "SAFELAUNCH_RUN_ROOT": str(self.runs), **(env or {})}
        with open(files[0], "wb") as out, open(files[1], "wb") as err:
            # Each step on the way execs the next, so this child becomes safelaunch itself.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd or self.cwd,
                env=environment,
                start_new_session=True,
            )
        running = Running(process, (files[0], files[1]), self.runs)
        self._all.append(running)
        return running

    def run(self, *arguments: str, timeout: float = 90, **options: Any) -> Result:
        """Run `safelaunch ARGUMENTS` to its end."""
        return self.start(*arguments, **options).wait(timeout)

    def stop_all(self) -> None:
        for running in self._all:
            running.stop()


def user_environment() -> dict[str, str]:
    """Return a plain user's environment: nothing of the test run's own gets to the nodes."""
    kept = {name: os.environ[name] for name in ("HOME", "TERM", "TZ") if name in os.environ}
    return {
        **kept,
        "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    }


def _run_directories(runs: Path) -> list[Path]:
    return (
        [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()] if runs.is_dir() else []
    )


def namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in os.fsdecode(raw).split("\0") if "=" in entry)


def command(pid: int) -> str:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).replace("\0", " ").strip()
    except OSError:
        return ""
