"""The run directory: everything a run leaves on disk, written as it happens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from dataclasses import dataclass
from importlib import resources
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RUN_ID = re.compile(r"\d{8}T\d{6}Z-[\w.+-]{1,40}-[0-9a-f]{6}")
"""`<UTC time>-<script>-<6 hex>`."""


class NoSuchRunError(Exception):
    """No run has that name; the message says which there are."""


def root(environ: Mapping[str, str]) -> str:
    """Return the directory that holds all run directories."""
    chosen = environ.get("SAFELAUNCH_RUN_ROOT")
    if chosen:
        return os.path.abspath(chosen)
    state = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "safelaunch", "runs")


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory on disk, of a live or an ended run."""

    path: str

    @property
    def run_id(self) -> str:
        """The run's name, also the value of SAFELAUNCH_RUN_ID in its processes."""
        return self.document("launcher").get("run_id") or os.path.basename(self.path)

    def file(self, *parts: str) -> str:
        """Return the path of a file in the run directory."""
        return os.path.join(self.path, *parts)

    def document(self, name: str) -> dict[str, Any]:
        """Read `<name>.json`; empty if it is not there or was cut off."""
        try:
            with open(self.file(f"{name}.json"), encoding="utf-8", errors="surrogateescape") as stream:
                value = json.load(stream)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Replace `<name>.json` in one step, so that a reader never sees half of it."""
        path = self.file(f"{name}.json")
        with open(f"{path}.new", "w", encoding="utf-8", errors="surrogateescape") as stream:
            json.dump(document, stream, indent=2)
            stream.write("\n")
        os.replace(f"{path}.new", path)

    def keep_evidence(self, message: Mapping[str, Any]) -> None:
        """Write what an agent found out about a rank that may hang: its stacks, and the rest as JSON."""
        os.makedirs(self.file("evidence"), exist_ok=True)
        name = self.file("evidence", f"rank-{message['rank']}")
        with open(f"{name}.stacks.txt", "w", encoding="utf-8", errors="surrogateescape") as stream:
            for process in message["processes"]:
                state = f"state {process['state']}, waits in {process['wchan'] or 'user space'}"
                stream.write(f"pid {process['pid']}, {state}: {process['command']}\n{process['stacks']}\n")
        rest = [{key: value for key, value in p.items() if key != "stacks"} for p in message["processes"]]
        document = {"taken": message["taken"], "mark": message["mark"], "processes": rest}
        with open(f"{name}.proc.json", "w", encoding="utf-8", errors="surrogateescape") as stream:
            json.dump(document, stream, indent=2)

    def alive(self) -> bool:
        """Tell whether the launcher of this run still runs: it holds a lock as long as it does."""
        try:
            with open(self.file("lock")) as stream:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events.jsonl; a line that was cut off by a kill is left out."""
        with contextlib.suppress(OSError), open(self.file("events.jsonl"), encoding="utf-8") as stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def create(directory: str, script: str, run_dir: str | None = None) -> tuple[Run, IO[str]]:
    """Make a run directory (mode 0700) and lock it; the lock ends when the returned file is closed.

    `run_dir` is the user's `--run-dir`, used as it is. Raises OSError.
    """
    stem = re.sub(r"[^\w.+-]", "_", os.path.splitext(os.path.basename(script))[0], flags=re.ASCII)[:40]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    run_id = f"{stamp}-{stem or 'run'}-{secrets.token_hex(3)}"
    path = os.path.abspath(run_dir) if run_dir else os.path.join(directory, run_id)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    os.makedirs(path, mode=0o700, exist_ok=run_dir is not None)
    run = Run(path)
    lock = open(run.file("lock"), "w")  # noqa: SIM115 - held until the run ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise FileExistsError(f"{path} is the run directory of a run that is still going on") from error
    for old in ("outcome.json", "events.jsonl", "preflight.json", "plan.json"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(run.file(old))
    for part in ("logs", "evidence", "env"):
        os.makedirs(run.file(part), mode=0o700, exist_ok=True)
    launcher = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    run.write("launcher", {"schema": "safelaunch.launcher/1", **launcher})
    _point_latest(directory, path)
    return run, lock


def _point_latest(directory: str, path: str) -> None:
    with contextlib.suppress(OSError):
        os.makedirs(directory, mode=0o700, exist_ok=True)
        link = os.path.join(directory, f".latest-{os.getpid()}")
        os.symlink(path, link)
        os.replace(link, os.path.join(directory, "latest"))


def all_runs(directory: str) -> list[Run]:
    """Return every run directory there is, oldest first."""
    try:
        names = sorted(name for name in os.listdir(directory) if RUN_ID.fullmatch(name))
    except OSError:
        return []
    return [Run(os.path.join(directory, name)) for name in names]


def find(directory: str, name: str) -> Run:
    """Return the run of that name: an id, a unique part of one, `latest`, or a path.

    Raises NoSuchRunError.
    """
    if os.sep in name or name in (".", ".."):
        path = os.path.abspath(name)
    elif name == "latest":
        path = os.path.realpath(os.path.join(directory, "latest"))
    else:
        matches = [run for run in all_runs(directory) if name in os.path.basename(run.path)]
        exact = [run for run in matches if os.path.basename(run.path) == name]
        if len(matches) != 1 and not exact:
            known = ", ".join(os.path.basename(run.path) for run in (matches or all_runs(directory))[-5:])
            problem = "several runs match" if matches else "no run is called"
            raise NoSuchRunError(f"{problem} {name!r} in {directory} ({known or 'there is none'})")
        return (exact or matches)[0]
    if not os.path.exists(os.path.join(path, "launcher.json")):
        raise NoSuchRunError(f"{path} is no run directory")
    return Run(path)


def prune(directory: str, keep: int) -> None:
    """Remove the oldest ended runs beyond `keep`; never one that may still have processes."""
    ended = [run for run in all_runs(directory) if run.document("outcome") and not run.alive()]
    for run in ended[: max(0, len(ended) - keep)]:
        shutil.rmtree(run.path, ignore_errors=True)


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document (`plan`, `preflight`, `outcome`, `event`)."""
    text = resources.files("safelaunch.schemas").joinpath(f"{name}.json").read_text(encoding="utf-8")
    value: dict[str, Any] = json.loads(text)
    return value
