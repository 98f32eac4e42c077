"""The probe: reads facts about a node, prints each as it is found, then answers questions about the network.

It arrives on stdin and runs from memory; docs/reference/node-programs.md is the contract. It writes nothing
to the node. The collectors stand in the parts that come with it (`probe_*.py`): each is a function from a
`Node` to something that JSON can hold, and what it raises, or that it is late, is the error of its own fact.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False  # importing `typing` costs every node milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

GATHER_SECONDS = 0.003
"""Facts found this close together go out in one write: each packet costs the launching side CPU."""
OUTPUT_KEPT = 16_384
"""Bytes of a tool's output that are kept."""
NAME_SECONDS = 3.0
"""For all names together: a lost question to a name server is repeated only after five seconds."""
FIRST_FREE_PORT = 29_501
"""Where the search for a free port begins: behind 29500, the default of DeepSpeed and torch."""


class Node:
    """What a collector may use: the configuration, and ways to look at the node."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.cwd: str = config["cwd"]
        self._groups: set[int] = set()

    def setting(self, name: str) -> str | None:
        """Return a variable as a rank will see it: the launcher's value over the node's own."""
        if name in self.config["env"]:
            return str(self.config["env"][name])
        return None if name in self.config["unset"] else os.environ.get(name)

    def search_path(self) -> list[str]:
        """Return the directories in which a rank's programs are searched."""
        return [self.path(part) for part in (self.setting("PATH") or os.defpath).split(":")]

    def path(self, path: str) -> str:
        """Return a path as a rank means it: relative to the working directory, `~` at its start."""
        return os.path.join(self.cwd, os.path.expanduser(path))

    def deadline(self, fact: str) -> float:
        """Return how many seconds a collector has."""
        return float(self.config.get("deadlines", {}).get(fact, self.config["deadline"]))

    def read(self, path: str, size: int = 1 << 20) -> bytes:
        """Return the first `size` bytes of a file."""
        with open(path, "rb") as stream:
            return stream.read(size)

    def word(self, path: str) -> str | None:
        """Return the text of a small file without blanks around; None if it is empty or unreadable."""
        try:
            return self.read(path).decode(errors="replace").strip() or None
        except OSError:
            return None

    def together(self, calls: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
        """Run all calls at once; one that is not back in time has None in its place."""
        answers: list[Any] = [None] * len(calls)

        def run(index: int) -> None:
            answers[index] = calls[index]()

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return list(answers)

    def run(self, argv: Sequence[str], timeout: float, env: dict[str, str]) -> tuple[int | None, str]:
        """Run a program and return its exit status and output; status None where it did not end in time.

        Such a program may be beyond SIGKILL (a driver that never returns), so it is not waited for.
        """
        import subprocess  # noqa: PLC0415 - milliseconds that most nodes need not spend

        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(
            argv, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True, env=env, cwd="/"
        )
        self._groups.add(process.pid)
        output = bytearray()
        ended = threading.Event()

        def drain() -> None:
            stream = process.stdout
            while stream is not None and len(output) < OUTPUT_KEPT:
                data = os.read(stream.fileno(), OUTPUT_KEPT)
                if not data:
                    break
                output.extend(data)
            process.wait()
            ended.set()

        threading.Thread(target=drain, daemon=True).start()
        in_time = ended.wait(timeout)
        status = process.returncode if in_time else None
        self._kill(process.pid)
        return status, bytes(output).decode(errors="surrogateescape")

    def kill_all(self) -> None:
        """Kill every program that `run` started and that still runs."""
        for group in list(self._groups):
            self._kill(group)

    def _kill(self, group: int) -> None:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass
        self._groups.discard(group)

    def parents(self, pid: int) -> Iterable[int]:
        """Yield a process, its parent and so on, but not PID 1."""
        while pid > 1:
            yield pid
            pid = int(self.read("/proc/%d/stat" % pid).rpartition(b")")[2].split()[1])

    def command(self, pid: int) -> str:
        """Return a process's command line."""
        line = self.read("/proc/%d/cmdline" % pid).replace(b"\0", b" ")
        return line.decode(errors="surrogateescape").strip()

    def short_command(self, pid: int) -> str:
        """Return the beginning of a process's command line, for a message."""
        return self.command(pid)[:200]

    def pids(self) -> list[int]:
        """Return the processes of this node."""
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]

    def resolve(self, names: Sequence[str]) -> tuple[dict[str, list[str] | None], list[str]]:
        """Return the addresses of names, None for an unknown name, and the names that got no answer.

        One after the other: all nodes ask the same name servers at this moment.
        """
        found: dict[str, list[str] | None] = {}

        def look_up() -> None:
            for name in names:
                try:
                    rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                except (OSError, UnicodeError):
                    found[name] = None
                else:
                    found[name] = list(dict.fromkeys(str(row[4][0]) for row in rows))

        self.together([look_up], NAME_SECONDS)
        known = dict(found)
        return known, [name for name in names if name not in known]


class Listeners:
    """Ports held for a test; the reservation of each port stays until the probe ends.

    A reservation is an abstract Unix socket: another preflight on this node sees the port as taken between
    our test and the moment when rank 0 listens, while rank 0 itself is not hindered.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._open: list[tuple[socket.socket, threading.Thread]] = []
        self._reserved: dict[int, socket.socket] = {}

    def listen(self, port: int, token: str) -> int:
        """Listen on `port` of all addresses, or for 0 on the next free one; who connects gets `token`."""
        error = OSError("no free port")
        for number in [port] if port else self._candidates():
            try:
                self._reserve(number)
                listener = self._bind(number)
            except OSError as failure:
                error = failure
            else:
                thread = threading.Thread(target=self._greet, args=(listener, token.encode()), daemon=True)
                thread.start()
                self._open.append((listener, thread))
                return number
        raise error

    def close(self) -> None:
        """Close all listeners."""
        while self._open:
            listener, thread = self._open.pop()
            listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which would hold the port beyond `close`
            thread.join(1)
            listener.close()

    def _candidates(self) -> list[int]:
        """Return ports that the kernel gives to nobody by itself (tcp(7): ip_local_port_range)."""
        range_file = "/proc/sys/net/ipv4/ip_local_port_range"
        low, high = (int(word) for word in (self._node.word(range_file) or "32768 60999").split())
        return [port for port in range(FIRST_FREE_PORT, 65_536) if not low <= port <= high]

    def _reserve(self, port: int) -> None:
        if port not in self._reserved:
            held = socket.socket(socket.AF_UNIX)
            try:
                held.bind("\0safelaunch-port-%d" % port)
            except OSError:
                held.close()
                raise OSError(0, "another safelaunch is about to use it") from None
            self._reserved[port] = held

    @staticmethod
    def _bind(port: int) -> socket.socket:
        try:
            listener = socket.socket(socket.AF_INET6)
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        except OSError:  # no IPv6 here
            listener = socket.socket(socket.AF_INET)
        # As torch's store does: what is left of closed connections (TIME_WAIT) holds no port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        return listener

    @staticmethod
    def _greet(listener: socket.socket, token: bytes) -> None:
        while True:
            try:
                caller, _address = listener.accept()
                with caller:
                    caller.sendall(token)
            except ConnectionError:
                continue
            except OSError:  # closed
                return


def holder(node: Node, port: int) -> dict[str, Any] | None:
    """Return who listens on a port: {user, pid, command}; pid and command None where we may not see them."""
    found: dict[str, Any] | None = None
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for fields in (line.split() for line in (node.word(table) or "").splitlines()[1:]):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add("socket:[%s]" % fields[9])
                found = {"user": user_name(int(fields[7])), "pid": None, "command": None}
    for pid in node.pids() if found else []:
        place = "/proc/%d/fd" % pid
        try:
            if any(os.readlink("%s/%s" % (place, name)) in inodes for name in os.listdir(place)):
                return {**(found or {}), "pid": pid, "command": node.short_command(pid)}
        except OSError:  # not ours to look at, or ended meanwhile
            continue
    return found


def user_name(uid: int) -> str:
    import pwd  # noqa: PLC0415 - may ask a directory service, so only where a name is needed

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def dial(address: str, port: int, timeout: float, token: str) -> dict[str, Any]:
    """Connect, and see whether our own listener is at the other end."""
    begin, kind, text = time.monotonic(), "", None
    try:
        with socket.create_connection((address, port), timeout) as connection:
            if connection.recv(len(token)).decode(errors="replace") != token:
                kind, text = "stranger", "something else answers there"
    except socket.timeout:
        kind, text = "timeout", "no answer in %.1f s" % timeout
    except socket.gaierror as error:
        kind, text = "name", error.strerror
    except ConnectionRefusedError as error:
        kind, text = "refused", error.strerror
    except OSError as error:
        kind, text = "other", error.strerror or str(error)
    seconds = time.monotonic() - begin
    found = {"address": address, "port": port, "ok": text is None, "kind": kind, "error": text}
    return {**found, "seconds": seconds}


class Probe:
    """One conversation: facts out, then commands in and replies out."""

    def __init__(self, node: Node, collectors: dict[str, Callable[[Node], Any]]) -> None:
        self._node = node
        self._collectors = collectors
        self._marker = node.config["marker"].encode()
        self._writing = threading.Lock()
        self._results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._listeners = Listeners(node)
        self._heard = time.monotonic()

    def work(self) -> None:
        """Collect, then wait; end when nobody has spoken to us for long, as when a link is cut."""
        try:
            self.collect()
        except Exception:
            sys.excepthook(*sys.exc_info())
            self.leave(1)  # a probe that says nothing would be waited for
        while True:
            left = self._heard + self._node.config["linger"] - time.monotonic()
            if left <= 0:
                self.leave()
            time.sleep(left)

    def collect(self) -> None:
        """Run all collectors at once; print facts as they come, then `done` when none is left."""
        begin = time.monotonic()
        ends = {name: begin + self._node.deadline(name) for name in self._collectors}
        for name in ends:
            threading.Thread(target=self._collect, args=(name,), daemon=True).start()
        while ends:
            found = {fact["fact"]: fact for fact in self._gathered(min(ends.values()))}
            now = time.monotonic()
            for name, end in ends.items():
                if end <= now and name not in found:
                    error = "no answer in %.0f s" % self._node.deadline(name)
                    found[name] = {"fact": name, "error": error, "seconds": now - begin}
            self._say([fact for name, fact in found.items() if ends.pop(name, None)])
        self._say([{"done": True}])

    def _collect(self, name: str) -> None:
        begin = time.monotonic()
        try:
            outcome = {"value": self._collectors[name](self._node)}
        except Exception as error:
            outcome = {"error": str(error) or type(error).__name__}
        self._results.put({"fact": name, **outcome, "seconds": time.monotonic() - begin})

    def _gathered(self, end: float) -> list[dict[str, Any]]:
        found = []
        try:
            found.append(self._results.get(timeout=max(0.0, end - time.monotonic())))
            time.sleep(GATHER_SECONDS)
            while True:
                found.append(self._results.get_nowait())
        except queue.Empty:
            return found

    def _say(self, messages: list[dict[str, Any]]) -> None:
        data = b"".join(self._marker + json.dumps(message).encode() + b"\n" for message in messages)
        with self._writing:
            while data:
                data = data[os.write(1, data) :]

    def obey(self, command: dict[str, Any]) -> None:
        """Carry one command out and reply."""
        self._heard = time.monotonic()
        try:
            reply = getattr(self, "do_" + command["do"])(command)
        except Exception as error:
            reply = {"error": str(error)}
        self._say([{"reply": command.get("id"), **reply}])

    def do_clock(self, _command: dict[str, Any]) -> dict[str, Any]:
        return {"time": time.time()}

    def do_listen(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"port": self._listeners.listen(command["port"], command["token"])}
        except OSError as error:
            text = error.strerror or str(error)
            return {"error": text, "holder": holder(self._node, command["port"])}

    def do_unlisten(self, _command: dict[str, Any]) -> dict[str, Any]:
        self._listeners.close()
        return {}

    def do_dial(self, command: dict[str, Any]) -> dict[str, Any]:
        timeout, token = command["timeout"], command["token"]

        def call(address: str, port: int) -> Callable[[], dict[str, Any]]:
            return lambda: dial(address, port, timeout, token)

        calls = [call(address, port) for address, port in command["targets"]]
        return {"results": [result for result in self._node.together(calls, timeout + 1) if result]}

    def do_resolve(self, command: dict[str, Any]) -> dict[str, Any]:
        found, late = self._node.resolve(command["names"])
        return {"results": found, "late": late}

    def leave(self, status: int = 0) -> None:
        """End at once, whatever threads are stuck, and take started programs along."""
        self._node.kill_all()
        os._exit(status)


def load(sources: Iterable[bytes], want: Iterable[str] | None) -> dict[str, Callable[[Node], Any]]:
    """Return the collectors of our parts by the names of their facts."""
    found = {}
    for source in sources:
        scope: dict[str, Any] = {"__name__": "safelaunch_probe_part"}
        exec(compile(source, sys.argv[1] + "-part", "exec"), scope)  # noqa: S102 - it came with us
        found.update({function.__name__: function for function in scope["COLLECTORS"]})
    return {name: function for name, function in found.items() if want is None or name in want}


def main() -> None:
    # `parts` are the sources of our parts, put here by transport/program.py.
    config = json.loads(sys.stdin.buffer.readline())
    probe = Probe(Node(config), load(globals()["parts"], config.get("want")))
    threading.Thread(target=probe.work, daemon=True).start()
    for line in iter(sys.stdin.buffer.readline, b""):
        command = json.loads(line)
        if command["do"] == "clock":  # the start of a thread would count as distance
            probe.obey(command)
        else:
            threading.Thread(target=probe.obey, args=(command,), daemon=True).start()
    probe.leave()


main()
