"""Fan-out: reach N hosts and run `true` on each, against pdsh and clush.

    python benchmarks/fanout.py [--sizes 16,64,256] [--rounds 5] [--rounds-large 5]

Hosts are loopback addresses served by real sshds of ours, so server and client share this machine's cores:
wall ratios are a floor of the advantage, client CPU is what carries over. Everything runs interleaved in the
same minutes; figures are medians. OpenSSH 9.0 to 9.8 spend most of their time in their default key exchange
(sntrup761), so each peer runs with the defaults and with curve25519-sha256: quote both or neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import sshd as sshds  # noqa: E402 (found through the path above)
from timing import Row  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FANOUT = 64
LARGE = 256
SILENT = 40
TIMEOUT = 20.0
JUDGED = 64

CPU_BOUND_MS = 5.0
WALL_BOUNDS = {"pdsh, curve25519": 0.65, "pdsh, defaults": 0.35}
SILENT_BOUND = 1.5


@contextlib.contextmanager
def hosts(count: int, silent: int = 0) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Serve `count` addresses, and let `silent` more accept without a word: home, good, silent."""
    port = sshds.free_port()
    good = [f"127.81.{n // 250}.{n % 250 + 1}" for n in range(count)]
    quiet = [f"127.82.0.{n + 1}" for n in range(silent)]
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            sshds.Sshd(top / str(n), good[n : n + sshds.LISTEN_MAX], port=port, options=["LogLevel INFO"])
            for n in range(0, count, sshds.LISTEN_MAX)
        ]
        for server in servers:
            if server is not servers[0]:
                server.directory.mkdir()
                for name in ("host_key", "host_key.pub", "authorized_keys"):
                    shutil.copy(servers[0].directory / name, server.directory / name)
            stack.enter_context(server)
        first = servers[0]
        shutil.copy(first.user_key.with_suffix(".pub"), first.directory / "authorized_keys")
        for server in servers[1:]:
            shutil.copy(first.directory / "authorized_keys", server.directory / "authorized_keys")
        first.trust(*good)
        for address in quiet:
            listener = stack.enter_context(socket.socket())
            listener.bind((address, port))
            listener.listen(64)
        yield first.home, good, quiet


def ours(home: str, names: list[str]) -> dict[str, float]:
    """Open and run `true` in this process; imports are not counted."""
    import fabric  # noqa: F401

    from safelaunch.transport import choose, handshake  # noqa: F401
    from safelaunch.transport.base import Unreachable

    cpu = _cpu()
    started = time.monotonic()
    transport = choose.make("ssh", names, ssh_port=None, fanout=FANOUT, environ=os.environ, home=home)
    last, failed, done = [0.0], [0], threading.Lock()

    def run(session: Any) -> None:
        channel = session.start("true")
        list(channel.lines())
        status = channel.wait(TIMEOUT)
        with done:
            last[0] = max(last[0], time.monotonic() - started)
            failed[0] += status != 0

    with ThreadPoolExecutor(FANOUT) as pool:

        def on_open(_: str, result: Any) -> None:
            if isinstance(result, Unreachable):
                failed[0] += result.code != "ssh.no_banner"
            else:
                pool.submit(run, result)

        transport.open(names, on_open, timeout=TIMEOUT / 4)
    wall, spent = time.monotonic() - started, _cpu() - cpu
    started = time.monotonic()
    transport.close()
    assert not failed[0], f"{failed[0]} of {len(names)} failed"
    return {"wall": wall, "cpu": spent, "last": last[0], "close": time.monotonic() - started}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def run_process(command: Sequence[str], environ: dict[str, str]) -> tuple[float, float, str]:
    """Run a whole process: wall and CPU seconds (children included), and its stdout."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - started
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {text[-2000:]}")
    return wall, usage.ru_utime + usage.ru_stime, text


def peers(home: Path, names: list[str]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return what runs `true` on the hosts, by name: command and environment."""
    listed = ",".join(names)
    found = {}
    for label, kex in (("defaults", ""), ("curve25519", " -oKexAlgorithms=curve25519-sha256")):
        options = f"-F {home}/.ssh/config -oBatchMode=yes{kex}"
        if shutil.which("pdsh"):
            command = ["pdsh", "-S", "-R", "ssh", "-f", str(FANOUT), "-w", listed, "true"]
            found[f"pdsh, {label}"] = (command, {**os.environ, "PDSH_SSH_ARGS_APPEND": options})
        if shutil.which("clush"):
            command = ["clush", "-S", "-q", "-f", str(FANOUT), "-o", options, "-w", listed, "true"]
            found[f"clush, {label}"] = (command, dict(os.environ))
    return found


def compare(count: int, repeat: int) -> dict[str, dict[str, float]]:
    """Return medians by contestant: `wall`, `cpu` (seconds), and for ours also `in_process` and its CPU."""
    taken: dict[str, list[dict[str, float]]] = {}
    with hosts(count) as (home, names, _):
        others = peers(home, names)
        worker = [sys.executable, __file__, "--worker", str(home), ",".join(names)]
        for turn in range(repeat):
            order = ["safelaunch", *others]
            for label in order[turn % len(order) :] + order[: turn % len(order)]:
                if label == "safelaunch":
                    wall, cpu, text = run_process(worker, dict(os.environ))
                    inside = json.loads(text.splitlines()[-1])
                    sample = {"wall": wall, "cpu": cpu, "inside": inside["wall"], "inside_cpu": inside["cpu"]}
                else:
                    wall, cpu, _ = run_process(*others[label])
                    sample = {"wall": wall, "cpu": cpu}
                taken.setdefault(label, []).append(sample)
    return {label: _medians(samples) for label, samples in taken.items()}


def with_silent(count: int, repeat: int) -> dict[str, float]:
    """Return medians of the time to the last good host, without and with silent ones among them."""
    taken: dict[str, list[float]] = {"without": [], "with": []}
    with hosts(count - SILENT, SILENT) as (home, good, quiet):
        for _ in range(repeat):
            for label, names in (("without", good), ("with", quiet + good)):
                worker = [sys.executable, __file__, "--worker", str(home), ",".join(names)]
                text = run_process(worker, dict(os.environ))[2]
                taken[label].append(json.loads(text.splitlines()[-1])["last"])
    return {label: statistics.median(values) for label, values in taken.items()}


def measure(
    rounds: int = 5, *, rounds_large: int | None = None, sizes: Sequence[int] = (16, 64, LARGE)
) -> list[dict[str, object]]:
    """Return the rows of the table.

    `rounds_large` is for 256 hosts and more, where one round of all contestants takes a minute.
    """
    rows = []
    for count in sizes:
        found = compare(count, rounds if count < LARGE else rounds_large or rounds)
        rows += _rows(count, found.pop("safelaunch"), found)
    if LARGE in sizes:
        last = with_silent(LARGE, rounds_large or rounds)
        rows.append(
            Row(
                name=f"fan-out: {SILENT} silent hosts among {LARGE}, last good one",
                value=round(last["with"] / last["without"], 3),
                unit="x",
                bound=SILENT_BOUND,
                peers={f"{label} them, s": round(value, 3) for label, value in last.items()},
            )
        )
    return [row.document() for row in rows]


def _rows(count: int, own: dict[str, float], found: dict[str, dict[str, float]]) -> Iterator[Row]:
    """Set our figures against the peers': in a process that runs already, and as a process of their own."""
    for suffix, cpu, wall, judged in (
        ("", "inside_cpu", "inside", True),
        (", whole process", "cpu", "wall", False),
    ):
        yield Row(
            name=f"fan-out to {count}: client CPU a host{suffix}",
            value=round(1000 * own[cpu] / count, 2),
            unit="ms",
            bound=CPU_BOUND_MS if judged else None,
            peers={label: round(1000 * values["cpu"] / count, 2) for label, values in found.items()},
        )
        for label, values in found.items():
            yield Row(
                name=f"fan-out to {count}: wall against {label}{suffix}",
                value=round(own[wall] / values["wall"], 3),
                unit="x",
                bound=WALL_BOUNDS.get(label) if judged and count == JUDGED else None,
                peers={"safelaunch, s": round(own[wall], 3), f"{label}, s": round(values["wall"], 3)},
            )


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="16,64,256", help="numbers of hosts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rounds-large", type=int, help="for 256 hosts and more")
    parser.add_argument("--worker", nargs=2, metavar=("HOME", "HOSTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(ours(options.worker[0], options.worker[1].split(","))))
        return
    if reason := sshds.missing():
        parser.exit(1, f"cannot measure: {reason}\n")
    sizes = [int(size) for size in options.sizes.split(",")]
    for row in measure(options.rounds, rounds_large=options.rounds_large, sizes=sizes):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
