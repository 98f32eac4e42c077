"""The agent: starts a node's ranks, watches them, ships what they print, and leaves nothing behind.

It arrives on stdin; docs/reference/node-programs.md is its contract. The process that was started becomes a
relay; the agent proper is forked away and speaks through a Unix socket, so that a broken connection costs
only the relay. The agent in turn forks a guardian, which ends the run if the agent dies.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote import agent_processes as procs
    from safelaunch.remote import agent_ranks as watching
else:
    # `parts` are the sources of our parts, put here by transport/program.py in the order of their names.
    procs, watching = types.ModuleType("agent_processes"), types.ModuleType("agent_ranks")
    for _module, _source in zip((procs, watching), globals()["parts"]):
        exec(compile(_source, "safelaunch-" + _module.__name__, "exec"), _module.__dict__)  # noqa: S102

POLL_FAST, POLL_SLOW = 0.02, 0.2
"""Seconds between two looks at files and processes: while something moves, and while nothing does."""
BACKLOG = 8_388_608
"""Bytes of output that may be on their way unconfirmed; beyond that they stay in the files."""
LEFTOVER_GRACE = 1.0
"""Seconds from TERM to KILL for what is left when all ranks are gone."""
UNSEEN_EXIT = 2.5
"""Seconds within which launch.py, which polls once a second, logs the status of a rank we saw too late."""
ORPHANED_RANKS = 10.0
"""Seconds that ranks whose node launcher died may wait for the order to stop."""
FAREWELL = b'{"event": "farewell"}\n'


class Agent:
    """One node's part of a run."""

    def __init__(self, config: dict[str, Any], directory: str, listener: socket.socket) -> None:
        self.config = config
        self.directory = directory
        self.listener = listener
        self.run_id: str = config["run_id"]
        self.node: str = config["node"]
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.client: socket.socket | None = None
        self.incoming = self.outgoing = b""
        self.events: deque[tuple[int, bytes]] = deque()
        self.seq = self.sent = self.unconfirmed = 0
        self.heard = self.moved = time.monotonic()
        self.waiting: dict[int, int] = dict(config["ranks"])
        self.ranks: dict[int, watching.RankProcess] = {}
        self.tails: list[watching.Tail] = []
        self.rank_logs: dict[int, Any] = {}
        self.launcher: int | None = None
        self.launcher_gone: float | None = None
        self.memory_kills = watching.memory_kills()
        self.stop_at: float | None = None
        self.kill_at = 0.0
        self.ranks_gone_at: float | None = None
        self.survivors: set[int] | None = None
        self.finished = self.leaving = False
        self.guardian = 0
        self.guard_pipe = -1

    # --- starting

    def run(self) -> None:
        """Start the node launcher, and serve until the run is over here."""
        watching.become_subreaper()
        signal.signal(signal.SIGTERM, lambda *_: self.stop(self.config["grace"], "the agent got SIGTERM"))
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_IGN)
        self.start_guardian()
        self.emit("agent_started", pid=os.getpid(), directory=self.directory)
        try:
            self.prepare()
            self.start_launcher()
        except OSError as error:
            self.emit("start_failed", error="%s: %s" % (error.filename or self.directory, error.strerror))
            self.stop(0, "the node launcher could not be started")
        while not self.leaving:
            hurried = self.waiting or self.stop_at is not None or time.monotonic() - self.moved < 1
            for key, _ in self.selector.select(POLL_FAST if hurried else POLL_SLOW):
                key.data()
            self.look()
        os.write(self.guard_pipe, b"!")
        procs.remove_directory(self.directory)
        self.drop_client(FAREWELL)

    def prepare(self) -> None:
        program = {**self.config["program"], "python": self.config["python"]}
        procs.write_json(os.path.join(self.directory, "launch.json"), program)
        with open(os.path.join(self.directory, "rank_shim.py"), "w", encoding="utf-8") as stream:
            stream.write(self.config["shim"])
        self.tails.append(watching.Tail(os.path.join(self.directory, "launcher.log"), None, "err"))
        for rank in self.waiting:
            for name in ("out", "err"):
                path = os.path.join(self.directory, "rank-%d.%s" % (rank, name))
                self.tails.append(watching.Tail(path, rank, name))

    def environment(self) -> dict[str, str]:
        env = dict(os.environ)
        for pattern in self.config["unset"]:
            prefix = pattern[:-1] if pattern.endswith("*") else None
            for name in [n for n in env if n == pattern or (prefix and n.startswith(prefix))]:
                del env[name]
        env.update(self.config["env"])
        env["SAFELAUNCH_RUN_ID"], env["SAFELAUNCH_NODE"] = self.run_id, self.node
        return env

    def command(self) -> list[str]:
        python = self.config["python"]
        options = ["-u", "-m", "deepspeed.launcher.launch", *self.config["launcher_options"]]
        options += ["--no_python", "--no_local_rank"]
        script = self.config.get("venv_script")
        if not script:
            shim = os.path.join(self.directory, "rank_shim.py")
            return [python, *options, python, "-I", shim, self.directory]
        # What the script activates (a venv or conda environment) is the interpreter from then on.
        activate = (
            '. "$1" || exit 126; p="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"; [ -x "$p" ] || p="$2"; '
            'export SAFELAUNCH_PYTHON="$p"; d="$3"; shift 3; '
            'exec "$p" "$@" "$p" -I "$d/rank_shim.py" "$d"'
        )
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        script = os.path.join(self.config["cwd"], script)
        return [shell, "-c", activate, "safelaunch", script, python, self.directory, *options]

    def start_launcher(self) -> None:
        process = subprocess.Popen(
            self.command(),
            cwd=self.config["cwd"],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.tails[0].fd,
            stderr=self.tails[0].fd,
            start_new_session=True,
        )
        self.launcher = process.pid
        process.returncode = 0  # we reap it ourselves, with everything else that comes to a subreaper
        self.emit("launcher_started", pid=self.launcher)

    def start_guardian(self) -> None:
        reading, writing = os.pipe()
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            self.guard(reading, agent)
        os.close(reading)
        if self.guard_pipe >= 0:
            os.close(self.guard_pipe)
        self.guardian, self.guard_pipe = pid, writing
        rows = {"agent": [agent, procs.start_time(agent)], "guardian": [pid, procs.start_time(pid)]}
        procs.write_json(os.path.join(self.directory, "agent.json"), rows)

    def guard(self, reading: int, agent: int) -> None:
        """Wait, in the guardian, for the agent's farewell; without one, end the run."""
        try:
            os.setsid()
            for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)
            self.selector.close()
            self.listener.close()
            if self.client is not None:
                self.client.close()
            if os.read(reading, 1) != b"!":
                procs.end_all(
                    lambda: procs.members(self.run_id, self.node, spare=(agent,)), self.config["grace"]
                )
                procs.remove_directory(self.directory)
        finally:
            os._exit(0)

    # --- talking

    def emit(self, event: str, **fields: Any) -> None:
        """Queue an event for the launcher; it is kept until it is confirmed."""
        self.seq += 1
        message = {"seq": self.seq, "event": event, "time": time.time(), **fields}
        data = json.dumps(message).encode() + b"\n"
        self.events.append((self.seq, data))
        self.unconfirmed += len(data)
        self.moved = time.monotonic()

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] not in (0, os.geteuid()):
            connection.close()
            return
        connection.settimeout(2)
        try:
            first = json.loads(connection.makefile("rb").readline() or b"{}")
            if first.get("do") != "attach":
                connected = self.client is not None and not self.silent()
                connection.sendall(json.dumps({"connected": connected}).encode() + b"\n")
                connection.close()
                return
        except (OSError, ValueError):
            connection.close()
            return
        self.drop_client(FAREWELL)
        connection.setblocking(False)
        self.client, self.incoming, self.outgoing = connection, b"", b""
        self.heard = time.monotonic()
        self.sent = first["after"]
        self.selector.register(connection, selectors.EVENT_READ, self.serve)

    def serve(self) -> None:
        if self.client is None:
            return
        try:
            data = self.client.recv(watching.CHUNK)
        except BlockingIOError:  # woken because there is room to write
            return
        except OSError:
            data = b""
        if not data:
            self.drop_client()
            return
        self.heard = time.monotonic()
        *lines, self.incoming = (self.incoming + data).split(b"\n")
        for line in lines:
            self.obey(json.loads(line))

    def obey(self, command: dict[str, Any]) -> None:
        while self.events and self.events[0][0] <= command.get("ack", 0):
            self.unconfirmed -= len(self.events.popleft()[1])
        do = command["do"]
        if do == "ping":
            pong = {"event": "pong", "id": command["id"], "time": time.time()}
            self.outgoing += json.dumps(pong).encode() + b"\n"
        elif do == "signal":
            procs.send_signal([p.pid for p in self.ranks.values() if not p.over], command["signal"])
        elif do == "stop":
            self.stop(command["grace"], command["reason"])
        elif do == "bye" and self.finished:
            self.leaving = True

    def pump(self) -> None:
        """Send what the socket takes."""
        if self.client is None:
            return
        for seq, data in self.events:
            if len(self.outgoing) > watching.CHUNK:
                break
            if seq > self.sent:
                self.outgoing += data
                self.sent = seq
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[self.client.send(self.outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            self.drop_client()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
        self.selector.modify(self.client, wanted, self.serve)

    def drop_client(self, last_words: bytes = b"") -> None:
        if self.client is None:
            return
        self.selector.unregister(self.client)
        try:
            self.client.setblocking(True)
            self.client.settimeout(1)
            self.client.sendall(last_words)
        except OSError:
            pass
        self.client.close()
        self.client = None

    def silent(self) -> bool:
        return time.monotonic() - self.heard > float(self.config["heartbeat"])

    # --- watching

    def look(self) -> None:
        """Look at everything that has no descriptor to wait for."""
        now = time.monotonic()
        self.reap()
        self.find_started()
        self.look_at_ranks(now)
        self.ship(now, final=False)
        limit = self.config["heartbeat"] + self.config["reconnect_grace"]
        if now - self.heard > limit:
            self.leaving = self.finished
            self.stop(self.config["grace"], "the launcher has been gone for %g s" % limit)
        if self.launcher_gone is not None and self.stop_at is None:
            idle = all(process.over for process in self.ranks.values())
            if idle or now - self.launcher_gone > ORPHANED_RANKS:
                self.stop(self.config["grace"], "the node launcher has ended")
        if self.stop_at is not None and not self.finished:
            self.go_on_stopping(now)
        self.pump()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.launcher:
                now = self.launcher_gone = time.monotonic()
                self.find_started()
                self.look_at_ranks(now)
                self.ship(now, final=False)
                self.emit("launcher_exited", pid=pid, **watching.describe(status))
            elif pid == self.guardian and not self.leaving:
                self.start_guardian()
            else:
                for process in self.ranks.values():
                    if process.pid == pid and not process.over:
                        self.rank_over(process, watching.describe(status))

    def find_started(self) -> None:
        for rank in list(self.waiting):
            record = procs.read_json(os.path.join(self.directory, "rank-%d.json" % rank))
            if record is None:
                continue
            local = self.waiting.pop(rank)
            process = self.ranks[rank] = watching.RankProcess(rank, record["pid"], record["started"])
            pidfd = watching.open_pidfd(process.pid)
            if pidfd is not None:
                self.selector.register(pidfd, selectors.EVENT_READ, lambda fd=pidfd: self.ended(fd))
            self.emit("rank_started", rank=rank, local_rank=local, pid=process.pid)

    def ended(self, pidfd: int) -> None:
        self.selector.unregister(pidfd)
        os.close(pidfd)
        self.look_at_ranks(time.monotonic())

    def look_at_ranks(self, now: float) -> None:
        for process in self.ranks.values():
            if process.over:
                continue
            status = process.wait_status()
            if isinstance(status, int):
                self.rank_over(process, watching.describe(status))
            elif status == "unseen":
                if process.gone_since is None:
                    process.gone_since = now
                told = self.told_by_launcher(process)
                if told or self.launcher_gone is not None or now - process.gone_since > UNSEEN_EXIT:
                    self.rank_over(process, told or {"status": None, "signal": None})

    def told_by_launcher(self, process: watching.RankProcess) -> dict[str, Any] | None:
        """Return what launch.py logged of a rank that was reaped before we looked."""
        fd = self.tails[0].fd
        size = os.fstat(fd).st_size
        log = os.pread(fd, watching.CHUNK, max(0, size - watching.CHUNK))
        if b"Process %d exits successfully" % process.pid in log:
            return {"status": 0, "signal": None}
        code = re.search(rb"exits with return code = (-?\d+)", log)
        unseen = [p for p in self.ranks.values() if not p.over and p.gone_since is not None]
        if code is None or unseen != [process]:
            return None
        number = int(code.group(1))
        return {"status": None, "signal": -number} if number < 0 else {"status": number, "signal": None}

    def rank_over(self, process: watching.RankProcess, end: dict[str, Any]) -> None:
        process.over = True
        kills = watching.memory_kills()
        oom = end["signal"] == signal.SIGKILL and kills > self.memory_kills
        self.memory_kills = kills
        self.ship(time.monotonic(), final=False)
        self.emit("rank_exited", rank=process.rank, pid=process.pid, oom=oom, **end)
        if (end["signal"] or end["status"]) and self.client is None:
            self.stop(self.config["grace"], "rank %d failed while the launcher was away" % process.rank)

    def ship(self, now: float, *, final: bool) -> None:
        """Send what the files hold, as far as the launcher takes it."""
        moving = True
        while moving:
            moving = False
            for tail in self.tails:
                if self.unconfirmed > BACKLOG or self.client is None:
                    return
                data = tail.read(now, final=final)
                if data:
                    moving = final or len(data) > watching.CHUNK // 2
                    self.copy_log(tail.rank, data)
                    text = data.decode("utf-8", "surrogateescape")
                    self.emit("output", rank=tail.rank, stream=tail.stream, data=text)

    def copy_log(self, rank: int | None, data: bytes) -> None:
        """Write the files of `--enable_each_rank_log`, named as DeepSpeed names them."""
        directory = self.config.get("rank_log_dir")
        if directory is None or rank is None:
            return
        try:
            if rank not in self.rank_logs:
                directory = os.path.join(self.config["cwd"], directory)
                os.makedirs(directory, exist_ok=True)
                name = "%s_rank%d.log" % (time.strftime("%Y%m%d%H%M%S"), rank)
                self.rank_logs[rank] = open(os.path.join(directory, name), "ab", buffering=0)  # noqa: SIM115
            self.rank_logs[rank].write(data)
        except OSError:  # a copy that can't be written must not end a job that trains
            pass

    # --- ending

    def stop(self, grace: float, reason: str) -> None:
        """Begin to stop, or shorten the grace of a stop that is under way."""
        now = time.monotonic()
        if self.stop_at is not None:
            self.kill_at = min(self.kill_at, now + grace)
            return
        self.stop_at, self.kill_at = now, now + grace
        self.emit("stopping", reason=reason)
        pids = [process.pid for process in self.ranks.values() if not process.over]
        procs.send_signal(pids, signal.SIGTERM)
        if pids and self.launcher is not None and self.launcher_gone is None:
            # launch.py would TERM the ranks' own children too, and so spoil a last checkpoint: it sleeps
            # until the ranks are gone.
            procs.send_signal([self.launcher], signal.SIGSTOP)

    def go_on_stopping(self, now: float) -> None:
        alive = procs.members(self.run_id, self.node, roots=(os.getpid(),), spare=(self.guardian,))
        if self.ranks_gone_at is None and all(process.over for process in self.ranks.values()):
            self.ranks_gone_at = now
            self.kill_at = min(self.kill_at, now + LEFTOVER_GRACE)
            procs.send_signal(alive, signal.SIGTERM)
        if alive and now >= self.kill_at:
            procs.send_signal(alive, signal.SIGKILL)
        if alive and now < self.kill_at + procs.KILLED_FOR:
            return
        self.reap()
        self.look_at_ranks(now)
        if any(not process.over and process.pid not in alive for process in self.ranks.values()):
            return  # its end is still to be told
        self.ship(now, final=True)
        if self.client is None or all(tail.drained for tail in self.tails):
            self.emit("finished", survivors=sorted(alive))
            self.finished = True


# --- the process that was started: a relay, or a sweep ------------------------------------------------


class Relay:
    """Copies lines between the launcher (our stdin and stdout) and the agent's socket."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.marker = config["marker"].encode()
        self.lock = threading.Lock()

    def say(self, line: bytes) -> None:
        with self.lock:
            sys.stdout.buffer.write(self.marker + line.rstrip(b"\n") + b"\n")
            sys.stdout.buffer.flush()

    def tell(self, event: str, **fields: Any) -> None:
        self.say(json.dumps({"event": event, "time": time.time(), **fields}).encode())

    def run(self, connection: socket.socket, after: int) -> None:
        """Relay until one side ends."""
        connection.sendall(json.dumps({"do": "attach", "after": after}).encode() + b"\n")
        threading.Thread(target=self.listen, args=(connection,), daemon=True).start()
        farewell = False
        try:
            for line in connection.makefile("rb"):
                farewell = line == FAREWELL
                if not farewell:
                    self.say(line)
        except BrokenPipeError:  # nobody reads us: the connection is gone
            os._exit(0)
        except ConnectionError:
            pass
        if not farewell:
            self.tell("agent_lost")
        os._exit(0)  # an ordinary exit would wait for the thread that reads stdin

    def listen(self, connection: socket.socket) -> None:
        try:
            for line in iter(sys.stdin.buffer.readline, b""):
                connection.sendall(line)
        except OSError:
            pass
        # Without a launcher there is nothing to relay; the agent notices by the closed socket.
        os._exit(0)


def start(config: dict[str, Any]) -> None:
    """Fork the agent away and relay for it."""
    relay = Relay(config)
    try:
        directory = procs.make_directory(config["run_id"], config["node"])
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(directory, "s"))
    except OSError as error:
        relay.tell("start_failed", seq=1, error=str(error))
        relay.tell("finished", seq=2, survivors=[])
        return
    listener.listen(8)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            run_agent(config, directory, listener)
        os._exit(0)
    os.wait()
    listener.close()
    attach(config, relay, directory, 0)


def run_agent(config: dict[str, Any], directory: str, listener: socket.socket) -> None:
    """Be the agent: away from the terminal, the connection and its descriptors."""
    log = os.open(os.path.join(directory, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((nothing, 0), (nothing, 1), (log, 2)):
        os.dup2(fd, target)
    os.chdir("/")
    status = 1
    try:
        Agent(config, directory, listener).run()
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def attach(config: dict[str, Any], relay: Relay, directory: str | None, after: int) -> None:
    """Relay for the agent of a run, or say that there is none and who of the run is left."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.path.join(directory or "", "s"))
    except OSError:
        relay.tell("no_agent", survivors=sorted(procs.members(config["run_id"], config["node"])))
        return
    relay.run(connection, after)


def main() -> None:
    config = json.loads(sys.stdin.buffer.readline())
    mode = config["mode"]
    if mode == "start":
        start(config)
    elif mode == "attach":
        directory = procs.directories().get((config["run_id"], config["node"]))
        attach(config, Relay(config), directory, config["after"])
    else:
        Relay(config).tell("sweep", **procs.sweep(config))


main()
