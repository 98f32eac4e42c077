"""Drives a real agent as the launcher does, over pipes instead of ssh."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from importlib import resources

from safelaunch.transport import program

FAKE_LAUNCHER = '''
"""Stands for deepspeed.launcher.launch without the 3 s import of torch: spawns, polls and ends as it does."""
import argparse, base64, json, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("world_info", "node_rank", "master_addr", "master_port"):
    parser.add_argument("--" + name)
parser.add_argument("--no_python", action="store_true")
parser.add_argument("--no_local_rank", action="store_true")
parser.add_argument("script")
parser.add_argument("args", nargs=argparse.REMAINDER)
args = parser.parse_args()
world = json.loads(base64.urlsafe_b64decode(args.world_info))
hosts = list(world)
node = int(args.node_rank)
first = sum(len(world[host]) for host in hosts[:node])
count = len(world[hosts[node]])
children = []
for index in range(count):
    rank = first + index
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank % count), WORLD_SIZE="9")
    children.append(subprocess.Popen([args.script, *args.args], env=env))
def end(signum, frame):
    for child in children:
        child.terminate()
    for child in children:
        child.wait(30)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print("launcher says hello", flush=True)
left = list(children)
while left:
    for child in list(left):
        if child.poll() is None:
            continue
        left.remove(child)
        if child.returncode:
            for other in left:
                other.terminate()
            for other in left:
                other.wait(30)
            print("x exits with return code = %d" % child.returncode, flush=True)
            sys.exit(child.returncode)
        print("Process %d exits successfully." % child.pid, flush=True)
    time.sleep(1)
'''


def fake_deepspeed(directory) -> str:
    """Write the stand-in package; return what PYTHONPATH needs."""
    package = directory / "fake" / "deepspeed" / "launcher"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "launch.py").write_text(FAKE_LAUNCHER)
    return str(directory / "fake")


class Driver:
    """The launcher's end of the line to one agent."""

    def __init__(self, tmp_path, script: str, *, slots=(0,), run_id=None, real=False, **config) -> None:
        self.run_id = run_id or f"20260101T000000Z-test-{uuid.uuid4().hex[:6]}"
        self.events: queue.Queue = queue.Queue()
        self.seen: list[dict] = []
        self.arrived = 0
        self.process: subprocess.Popen | None = None
        self._processes: list[tuple[subprocess.Popen, threading.Thread]] = []
        env = {"DS_ACCELERATOR": "cpu"} if real else {"PYTHONPATH": fake_deepspeed(tmp_path)}
        (tmp_path / "rank.py").write_text(script)
        world = program_world({"n": list(slots)})
        self.config = {
            "mode": "start",
            "run_id": self.run_id,
            "host": "n",
            "node": "0",
            "python": sys.executable,
            "launcher_options": [
                f"--world_info={world}",
                "--node_rank=0",
                "--master_addr=127.0.0.1",
                "--master_port=29511",
            ],
            "program": {
                "argv": [sys.executable, "-u", str(tmp_path / "rank.py")],
                "args": [],
                "local_rank": False,
            },
            "env": env,
            "unset": [],
            "cwd": str(tmp_path),
            "venv_script": None,
            "shim": resources.files("safelaunch.remote").joinpath("rank_shim.py").read_text(),
            "hook": resources.files("safelaunch.remote").joinpath("rank_hook.py").read_text(),
            "rank_hook": True,
            "ranks": [[rank, rank] for rank in range(len(slots))],
            "grace": 5.0,
            "reconnect_grace": 2.0,
            "heartbeat": 2.0,
            "rank_log_dir": None,
            **config,
        }
        self._pinging = threading.Event()

    def start(self, **config):
        """Run the agent program; every line of it arrives in `events`."""
        marker = program.new_marker()
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", program.command("agent", sys.executable)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.process.stdin.write(program.payload("agent", {**self.config, **config, "marker": marker}))
        self.process.stdin.flush()
        reader = threading.Thread(target=self._read, args=(self.process, marker), daemon=True)
        reader.start()
        self._processes.append((self.process, reader))
        self._pinging.set()
        threading.Thread(target=self._ping, args=(self.process,), daemon=True).start()
        return self

    def attach(self):
        return self.start(mode="attach", after=self.arrived)

    def _read(self, process, marker):
        for line in process.stdout:
            assert line.startswith(marker.encode()), line
            self.events.put(json.loads(line[len(marker) :]))
        self.events.put({"event": "eof"})

    def _ping(self, process):
        while self._pinging.is_set() and process.poll() is None:
            self.tell({"do": "ping", "id": 1, "ack": self.arrived}, process)
            time.sleep(0.3)

    def stop_pinging(self):
        self._pinging.clear()

    def tell(self, command, process=None):
        try:
            stream = (process or self.process).stdin
            stream.write(json.dumps(command).encode() + b"\n")
            stream.flush()
        except (OSError, ValueError):
            pass

    def next(self, timeout=60):
        message = self.events.get(timeout=timeout)
        if "seq" in message:
            assert message["seq"] == self.arrived + 1, (message["seq"], self.arrived)
            self.arrived = message["seq"]
        if message["event"] != "pong":
            self.seen.append(message)
        return message

    def until(self, event, timeout=60, **fields):
        """Return the first message of that kind with those fields, past or to come."""
        end = time.monotonic() + timeout
        while True:
            for message in self.seen:
                if message["event"] == event and all(message.get(k) == v for k, v in fields.items()):
                    return message
            left = end - time.monotonic()
            assert left > 0, f"no {event} {fields} among {self.seen[-20:]}"
            try:
                self.next(timeout=left)
            except queue.Empty:
                continue

    def output(self, rank, stream="out"):
        data = "".join(
            m["data"]
            for m in self.seen
            if m["event"] == "output" and m["rank"] == rank and m["stream"] == stream
        )
        return data.encode("utf-8", "surrogateescape")

    def stop(self, grace=5):
        self.tell({"do": "stop", "grace": grace, "reason": "test"})

    def finish(self, timeout=60):
        """Wait for the end of the run on the node, say good-bye, and return the `finished` event."""
        finished = self.until("finished", timeout)
        self.tell({"do": "bye", "ack": self.arrived})
        assert self.process.wait(timeout=30) == 0
        self.until("eof")
        assert not [m for m in self.seen if m["event"] == "agent_lost"]
        return finished

    def directory(self):
        return self.until("agent_started")["directory"]

    def left(self):
        return left_of(self.run_id)

    def kill(self):
        """For the end of a test: leave nothing, whatever happened."""
        self.stop_pinging()
        for process, reader in self._processes:
            process.kill()
            process.wait()
            reader.join(timeout=10)
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()
        sweep(only=[self.run_id], kill=True)


def program_world(world):
    import base64

    return base64.urlsafe_b64encode(json.dumps(world).encode()).decode()


def left_of(run_id):
    """Return pids whose environment carries the run id."""
    needle = f"SAFELAUNCH_RUN_ID={run_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if needle in stream.read().split(b"\0"):
                        with open(f"/proc/{name}/stat", "rb") as stat:
                            if stat.read().rpartition(b") ")[2][:1] not in b"ZX":
                                found.append(int(name))
            except OSError:
                continue
    return found


def sweep(**config):
    """Run the agent program's sweep and return its event."""
    marker = program.new_marker()
    config = {"mode": "sweep", "marker": marker, "host": "n", "grace": 1.0, **config}
    done = subprocess.run(
        ["/bin/sh", "-c", program.command("agent", sys.executable)],
        input=program.payload("agent", config),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout[len(marker) :])


def wait_for(condition, timeout=30):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
