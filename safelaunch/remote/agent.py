"""The agent: starts a node's ranks, watches them, ships what they print, and leaves nothing behind.

It arrives on stdin; docs/reference/node-programs.md is its contract. The process that was started becomes a
relay; the agent proper is forked away and speaks through a Unix socket, so that a broken connection costs
only the relay. Between the two stands the guardian, the agent's parent: it ends the run if the agent dies,
and inherits the agent's orphans then.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import types
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from safelaunch.remote import agent_evidence as evidence
    from safelaunch.remote import agent_files as files
    from safelaunch.remote import agent_guard as guarding
    from safelaunch.remote import agent_processes as procs
    from safelaunch.remote import agent_progress as progress
    from safelaunch.remote import agent_ranks as ranks
    from safelaunch.remote import agent_relay as relaying
    from safelaunch.remote import agent_start as starting
    from safelaunch.remote import agent_sweep as sweeping
    from safelaunch.remote import agent_talk as talk
else:
    # `parts` are the sources of our parts, put here by transport/program.py in the order of their names.
    _names = [
        "evidence",
        "files",
        "guarding",
        "procs",
        "progress",
        "ranks",
        "relaying",
        "starting",
        "sweeping",
        "talk",
    ]
    _modules = {name: types.ModuleType(name) for name in _names}
    for _name, _source in zip(_names, globals()["parts"]):
        _modules[_name].__dict__.update(_modules)
        exec(compile(_source, "safelaunch-agent-" + _name, "exec"), _modules[_name].__dict__)  # noqa: S102
    globals().update(_modules)

REST_SHORT, REST_LONG = 0.02, 0.2
"""Seconds between two looks at files: while something moves, and while nothing does."""
PATIENCE = 10.0
"""Seconds after a failure in which the launcher may gather evidence and give the order to stop."""


class Agent:
    """One node's part of a run."""

    def __init__(
        self,
        config: dict[str, Any],
        directory: str,
        listener: socket.socket,
        guardian: procs.Process,
        guard_pipe: int,
    ) -> None:
        self.config = config
        self.directory = directory
        self.listener = listener
        self.guardian = guardian
        self.guard_pipe = guard_pipe
        self.selector = selectors.DefaultSelector()
        self.outbox = talk.Outbox()
        self.client: talk.Connection | None = None
        self.heard = time.monotonic()  # when the launcher was last there
        self.rest = REST_SHORT
        self.more_to_send = False
        self.waiting: dict[int, int] = dict(config["ranks"])
        self.ranks: dict[int, ranks.Rank] = {}
        self.reaped: dict[int, int] = {}
        self.tails: deque[files.Tail] = deque()
        self.launcher_log: files.Tail | None = None
        self.logs: list[files.RankLog] = []
        self.launcher: procs.Process | None = None
        self.launcher_end: dict[str, Any] | None = None
        self.memory_kills = ranks.MemoryKills()
        self.watch = progress.Watch(config["hook"], directory)
        self.gatherings: list[evidence.Gathering] = []
        self.rank_failed = False
        self.failed_at: float | None = None
        self.ending: procs.Ending | None = None
        self.next_step = 0.0
        self.over = self.finished = self.leaving = self.told_to_stop = self.abandoned = False

    # --- starting

    def run(self) -> None:
        """Start the node launcher, and serve until the run is over here."""
        procs.become_subreaper()
        self._wait_for(self.listener, self._accept)
        self._wait_for(*starting.catch_signals(self._on_term))
        self.outbox.add("agent_started", pid=os.getpid(), directory=self.directory)
        try:
            self._prepare()
            self._start_launcher()
        except OSError as error:
            place = os.fsdecode(error.filename) if error.filename else self.directory
            self.outbox.add("start_failed", error="%s: %s" % (place, error.strerror or error))
            self._end(0)
        # Later than the node launcher: what we start would inherit it.
        procs.hide_from_memory_killer()
        while not self.leaving:
            ready = self.selector.select(self._pause())
            # How a rank ended can be read until launch.py has reaped it, so ranks come first.
            for key, _ in sorted(ready, key=lambda item: item[0].data[0]):
                key.data[1]()
            self._look(time.monotonic())
        files.remove_directory(self.directory)
        os.write(self.guard_pipe, guarding.ENOUGH)
        self._drop_client(talk.FAREWELL)

    def _wait_for(self, source: Any, callback: Callable[[], object], order: int = 1) -> None:
        self.selector.register(source, selectors.EVENT_READ, (order, callback))

    def _on_term(self, *_: object) -> None:
        self.told_to_stop = True

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _prepare(self) -> None:
        # Clean-up services of /tmp leave a locked directory alone (tmpfiles.d(5)).
        self.lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        files.write_json(
            self._path("launch.json"),
            {**self.config["program"], "python": self.config["python"], "hook": self.config["rank_hook"]},
        )
        for name, source in (("rank_shim.py", "shim"), ("sitecustomize.py", "hook")):
            with open(self._path(name), "w", encoding="utf-8") as stream:
                stream.write(self.config[source])
        self.launcher_log = files.Tail(self._path("launcher.log"), None, "err")
        self.tails.append(self.launcher_log)
        directory, began = self.config.get("rank_log_dir"), time.time()
        for rank in self.waiting:
            log = None
            if directory is not None:
                log = files.RankLog(os.path.join(self.config["cwd"], directory), began, rank)
                self.logs.append(log)
            for name in ("out", "err"):
                self.tails.append(files.Tail(self._path("rank-%d.%s" % (rank, name)), rank, name, log))

    def _start_launcher(self) -> None:
        if self.launcher_log is None:
            return
        process = subprocess.Popen(
            starting.command(self.config, self.directory),
            cwd=self.config["cwd"],
            env=starting.environment(self.config),
            stdin=subprocess.DEVNULL,
            stdout=self.launcher_log.fd,
            stderr=self.launcher_log.fd,
            start_new_session=True,
        )
        process.returncode = 0  # we reap it ourselves, with everything else that comes to a subreaper
        self.launcher = procs.read(process.pid)
        self.outbox.add("launcher_started", pid=process.pid)
        if self.launcher is not None:
            row = {"pid": process.pid, "started": self.launcher.started}
            files.write_json(self._path("launcher.json"), row)

    # --- talking

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] not in (0, os.geteuid()):
            sock.close()
            return
        connection = talk.Connection(sock)
        self._wait_for(sock, lambda: self._serve(connection))

    def _serve(self, connection: talk.Connection) -> None:
        if connection.closed:  # by what was done in the same round
            return
        lines = connection.receive()
        if lines is None:
            self._drop(connection)
        for line in lines or ():
            try:
                self._obey(connection, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._answer(connection, event="refused", error=repr(error))

    def _answer(self, connection: talk.Connection, **fields: Any) -> None:
        connection.say(json.dumps(fields).encode() + b"\n")
        self._flush(connection)

    def _obey(self, connection: talk.Connection, command: dict[str, Any]) -> None:
        do = command["do"]
        if do == "attach":
            self._drop_client(talk.FAREWELL)
            self.outbox.rewind(command["after"])
            self.watch.forget()
            self.client, self.heard = connection, time.monotonic()
        elif do == "status":
            self._answer(connection, connected=self._connected())
        elif connection is self.client:
            self.heard = time.monotonic()
            self.outbox.confirm(command.get("ack", 0))
            if do == "ping":
                self._answer(connection, event="pong", id=command["id"], time=time.time())
            elif do == "signal":
                self._signal_ranks(command["signal"])
            elif do == "evidence":
                self.gatherings += [
                    evidence.Gathering(command["id"], rank, self.watch.reader(number))
                    for number, rank in self.ranks.items()
                    if not rank.over and number in command["ranks"]
                ]
            elif do == "stop":
                self._stop(command["grace"], command["reason"])
            elif do == "bye":
                self.leaving = self.finished

    def _signal_ranks(self, signum: int) -> None:
        for rank in self.ranks.values():
            process = rank.process()
            if process is not None and not rank.over:
                procs.send_signal(process, signum)

    def _flush(self, connection: talk.Connection) -> bool:
        if connection.closed or not connection.flush():
            self._drop(connection)
            return False
        key = self.selector.get_key(connection.sock)
        if key.events != connection.wanted:
            self.selector.modify(connection.sock, connection.wanted, key.data)
        return True

    def _drop(self, connection: talk.Connection, last_words: bytes = b"") -> None:
        if connection.closed:
            return
        self.selector.unregister(connection.sock)
        connection.close(last_words)
        if connection is self.client:
            self.client, self.heard = None, time.monotonic()

    def _drop_client(self, last_words: bytes) -> None:
        if self.client is not None:
            self._drop(self.client, last_words)

    def part(self, last_words: bytes) -> None:
        """Say something to the launcher, or to the relay that is just coming, and hang up."""
        if self.client is None:
            self.listener.settimeout(1)
            try:
                self.client = talk.Connection(self.listener.accept()[0])
            except OSError:
                return
        self.client.close(last_words)

    def _silent_for(self) -> float:
        """Return for how many seconds there has been no launcher; 0 while there is one."""
        allowed = self.config["heartbeat"] if self.client is not None else 0
        return max(0.0, time.monotonic() - self.heard - float(allowed))

    def _connected(self) -> bool:
        return self.client is not None and self._silent_for() == 0

    def _pump(self, now: float) -> None:
        """Send what there is, as far as the socket takes it, and not so long that others have to wait."""
        self.more_to_send = False
        for _ in range(32):
            if self.client is None or self.client.is_crowded():
                break
            if self.outbox.all_sent and not self._take_output(now) and not self._finish(now):
                break
            self.client.say(self.outbox.next_line())
            if self.client.is_crowded():
                self._flush(self.client)
        else:
            self.more_to_send = True
        if self.client is not None:
            self._flush(self.client)

    def _take_output(self, now: float) -> bool:
        """Put the next piece of output into the outbox, from each file in its turn."""
        for index, tail in enumerate(self.tails):
            if self.outbox.takes_output and self._take_from(tail, now):
                self.tails.rotate(-1 - index)
                return True
        return False

    def _take_from(self, tail: files.Tail, now: float) -> bool:
        end = tail.next_end(now, final=self.over)
        if end == tail.sent:
            return False
        self.outbox.add_output(tail, end)
        self.rest = REST_SHORT
        return True

    def _finish(self, now: float) -> bool:
        """Add the last event, once nothing is left of the run and all output has been sent."""
        waits = any(tail.next_end(now, final=True) != tail.sent for tail in self.tails)
        if self.finished or not self.over or self.ending is None or waits:
            return False
        self.outbox.add("finished", survivors=self.ending.survivors)
        self.finished = True
        return True

    # --- watching

    def _pause(self) -> float:
        if self.more_to_send or self.gatherings:
            return 0 if self.more_to_send else REST_SHORT
        self.rest = REST_SHORT if self.waiting else min(self.rest * 1.5, REST_LONG)
        unpolled = all(rank.over or rank.pidfd is not None for rank in self.ranks.values())
        rest = self.rest if unpolled else REST_SHORT
        if self.ending is None or self.over:
            return rest
        return min(rest, max(0.0, self.next_step - time.monotonic()))

    def _look(self, now: float) -> None:
        """Look at everything that has no descriptor to wait for, and decide what follows from it."""
        self._reap()
        self._find_started()
        for rank in self.ranks.values():
            if rank.pidfd is None:
                self._look_at(rank)
        self._settle_unseen()
        for tail in self.tails:
            tail.copy_to_log()
        for log in self.logs:
            if log.error:
                self.outbox.add("log_failed", path=log.path, error=log.error)
                log.error = None
        self._keep_guardian()
        self._report(now)
        self._decide(now)
        self._go_on_ending(now)
        self._pump(now)

    def _report(self, now: float) -> None:
        """Tell what the ranks do, and the evidence that has come together."""
        if self.client is not None:
            rows = self.watch.news(self.ranks, now)
            if rows:
                self._answer(self.client, event="progress", time=time.time(), ranks=rows)
        for gathering in list(self.gatherings):
            if gathering.step(now):
                self.gatherings.remove(gathering)
                self.outbox.add("evidence", **gathering.event())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.launcher is not None and pid == self.launcher.pid:
                self._launcher_over(ranks.describe(status))
                continue
            if self.waiting:
                self.reaped[pid] = status
            for rank in self.ranks.values():
                if rank.pid == pid:
                    self._rank_over(rank, ranks.describe(status))

    def _launcher_over(self, end: dict[str, Any]) -> None:
        self._find_started()
        for rank in self.ranks.values():
            self._look_at(rank)
        self.launcher_end = end
        self._settle_unseen()
        if self.launcher is not None:
            self.outbox.add("launcher_exited", pid=self.launcher.pid, **end)
            self.launcher = None

    def _find_started(self) -> None:
        for number, local in list(self.waiting.items()):
            record = files.read_json(self._path("rank-%d.json" % number))
            if record is None:
                continue
            del self.waiting[number]
            rank = self.ranks[number] = ranks.Rank(number, local, record["pid"], record["started"])
            self.outbox.add("rank_started", rank=number, local_rank=local, pid=rank.pid)
            if rank.pid in self.reaped:
                self._rank_over(rank, ranks.describe(self.reaped[rank.pid]))
            elif rank.pidfd is not None:
                self._wait_for(rank.pidfd, functools.partial(self._look_at, rank), order=0)
            self._look_at(rank)

    def _look_at(self, rank: ranks.Rank) -> None:
        status = None if rank.over else rank.look(time.monotonic())
        if status is not None:
            self._rank_over(rank, ranks.describe(status))
        elif rank.unseen_since is not None:
            self._forget_pidfd(rank)

    def _forget_pidfd(self, rank: ranks.Rank) -> None:
        if rank.pidfd is not None and rank.pidfd in self.selector.get_map():
            self.selector.unregister(rank.pidfd)
        rank.close()

    def _settle_unseen(self) -> None:
        """Learn from launch.py how those ranks ended that it reaped before we looked."""
        unseen = [rank for rank in self.ranks.values() if not rank.over and rank.unseen_since is not None]
        if not unseen or self.launcher_log is None:
            return
        log = self.launcher_log.last()
        for rank in unseen:
            if ranks.ended_well(log, rank.pid):
                self._rank_over(rank, ranks.SUCCESS)
        # A launch.py that we ended ourselves says nothing about its ranks.
        end = self.launcher_end if self.ending is None else None
        failure = ranks.first_failure(log, end)
        for rank in sorted(unseen, key=lambda rank: rank.unseen_since or 0):
            if rank.over:
                continue
            if failure is not None and not self.rank_failed:
                self._rank_over(rank, failure)
            elif self.launcher_end is not None:
                well = end is not None and end["status"] == 0
                self._rank_over(rank, ranks.SUCCESS if well else ranks.NOT_SEEN)

    def _rank_over(self, rank: ranks.Rank, end: dict[str, Any]) -> None:
        if rank.over:
            return
        rank.over = True
        self._forget_pidfd(rank)
        for tail in self.tails:  # its traceback first, but not megabytes
            if tail.rank == rank.rank and self.client is not None and self.outbox.takes_output:
                self._take_from(tail, time.monotonic())
        oom = self.memory_kills.explain(end)
        last = self.watch.last_words(rank.rank)
        self.outbox.add("rank_exited", rank=rank.rank, pid=rank.pid, oom=oom, **end, **last)
        if end != ranks.SUCCESS:
            self.rank_failed = True
            self.failed_at = self.failed_at or time.monotonic()
            if self.ending is None:
                self._hold_launcher()

    def _hold_launcher(self) -> None:
        """Keep launch.py from TERMing the ranks, again or too early, and from hiding how they end."""
        if self.launcher is not None:
            procs.send_signal(self.launcher, signal.SIGSTOP)

    def _keep_guardian(self) -> None:
        now = procs.read(self.guardian.pid)
        if now is None or not now.alive or now.started != self.guardian.started:
            os.close(self.guard_pipe)
            pid, self.guard_pipe = guarding.fork(self.config, self.directory)
            self.guardian = procs.read(pid) or self.guardian

    # --- ending

    def _decide(self, now: float) -> None:
        """Give orders that the launcher did not give."""
        grace = float(self.config["grace"])
        silent_for = self._silent_for()
        if silent_for > self.config["reconnect_grace"]:
            self.abandoned = True
            if self.ending is None:
                self._stop(grace, "the launcher has been gone for %d s" % silent_for)
        elif self.told_to_stop:
            self.told_to_stop = False
            self.abandoned = not self._connected()
            self._stop(grace, "the agent got SIGTERM")
        if self.over and self.abandoned and not self._connected():
            self.leaving = True
        if self.launcher_end is not None and self.ending is None:
            running = any(not rank.over for rank in self.ranks.values())
            if running or (self.waiting and self._members()):
                self.failed_at = self.failed_at or now
            else:
                self._end(grace)
        if self.failed_at is not None and self.ending is None:
            if not self._connected():
                self._stop(grace, "it failed while the launcher was away")
            elif now - self.failed_at > PATIENCE:
                self._stop(grace, "it failed, and no order came for %g s" % PATIENCE)

    def _stop(self, grace: float, reason: str) -> None:
        """Begin to stop, or shorten the grace of a stop that is under way."""
        if self.ending is None:
            self.outbox.add("stopping", reason=reason)
        ending = self.ending or self._end(grace)
        ending.kill_at = min(ending.kill_at, time.monotonic() + grace)
        self.next_step = 0

    def _end(self, grace: float) -> procs.Ending:
        self._hold_launcher()
        last = self.launcher.pid if self.launcher is not None else None
        self.ending = procs.Ending(self._members, grace, last)
        return self.ending

    def _members(self) -> dict[int, procs.Process]:
        return procs.members(
            self.config["run_id"], self.config["node"], above=(os.getpid(),), spare=(self.guardian.pid,)
        )

    def _go_on_ending(self, now: float) -> None:
        if self.ending is None or self.over or now < self.next_step:
            return
        pause = self.ending.step()
        if pause is not None:
            self.next_step = time.monotonic() + pause
            return
        self._reap()
        self._settle_unseen()
        for rank in self.ranks.values():
            self._look_at(rank)
            if rank.pid not in self.ending.survivors:
                self._rank_over(rank, ranks.NOT_SEEN)
        self.over = True


def guard(config: dict[str, Any], directory: str, listener: socket.socket) -> None:
    """Fork the agent, then be its guardian; never returns.

    As the agent's parent and a subreaper, the guardian inherits the agent's orphans.
    """
    os.setsid()
    os.chdir(directory)  # by that, `procs.keepers` tells whose agent and guardian it is
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    reading, writing = os.pipe()
    guarding.close_all_but(listener.fileno(), reading, writing)
    procs.become_subreaper()
    guardian = procs.read(os.getpid())
    if os.fork() == 0:
        os.close(reading)
        os.setsid()
        if guardian is not None:
            run_agent(Agent(config, directory, listener, guardian, writing))
    os.close(writing)
    listener.close()
    guarding.watch_over(config, directory, reading)


def run_agent(agent: Agent) -> None:
    """Run it; what it dies of goes to the launcher, if that is there."""
    try:
        agent.run()
    except BaseException:
        words = {"event": "agent_lost", "time": time.time(), "error": traceback.format_exc()}
        agent.part(json.dumps(words).encode() + b"\n" + talk.FAREWELL)
        os._exit(1)
    os._exit(0)


def start(config: dict[str, Any]) -> None:
    """Fork guardian and agent away, and relay for them."""
    relay = relaying.Relay(config)
    try:
        directory = files.make_directory(config["run_id"], config["node"])
        listener = files.listen(directory)
    except OSError as error:
        relay.tell("start_failed", seq=1, error=str(error))
        relay.tell("finished", seq=2, survivors=[])
        return
    if os.fork() == 0:
        try:
            if os.fork() == 0:
                guard(config, directory, listener)
        finally:
            os._exit(0)
    os.wait()
    listener.close()
    relaying.attach(config, relay, [directory], 0)


def main() -> None:
    config = json.loads(sys.stdin.buffer.readline())
    if config["mode"] == "start":
        start(config)
    elif config["mode"] == "attach":
        wanted = (config["run_id"], config["node"])
        places = [path for key, path in files.directories().items() if key[:2] == wanted]
        relaying.attach(config, relaying.Relay(config), places, config["after"])
    else:
        relaying.Relay(config).tell("sweep", **sweeping.sweep(config))


main()
