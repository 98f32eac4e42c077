"""The agent as a real process: what it reports, and that it never leaves anything behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from agent_driver import Driver, left_of, sweep, wait_for

pytestmark = pytest.mark.contract

SLEEP = "import time; print('up', flush=True); time.sleep(300)"


@pytest.fixture
def drive(tmp_path):
    drivers = []

    def make(script, **config):
        driver = Driver(tmp_path, script, **config).start()
        drivers.append(driver)
        return driver

    yield make
    for driver in drivers:
        driver.kill()
        assert not driver.left()


def pids(driver):
    return {rank: driver.until("rank_started", rank=rank)["pid"] for rank, _ in driver.config["ranks"]}


def keeper(driver, name):
    """Return the pid of the driver's "agent" or "guardian": both stand in the run's directory."""
    agent, directory = driver.until("agent_started")["pid"], driver.directory()
    for other in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{other}/cwd") == directory and (int(other) == agent) == (name == "agent"):
                return int(other)
    return None


def test_a_good_run(drive):
    driver = drive(
        "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)", slots=(0, 1)
    )
    finished = driver.finish()

    for rank in (0, 1):
        assert driver.output(rank) == b"out %d\n" % rank
        assert driver.output(rank, "err") == b"err\n"
        assert driver.until("rank_exited", rank=rank)["status"] == 0
    assert driver.until("launcher_exited")["status"] == 0
    assert b"hello" in driver.output(None, "err")
    assert finished["survivors"] == []
    assert not os.path.exists(driver.directory())


@pytest.mark.parametrize(
    ("script", "status", "signum"),
    [
        ("import sys; sys.exit(3)", 3, None),
        ("import sys; sys.exit(247)", 247, None),
        ("import os; os.kill(os.getpid(), 9)", None, 9),
        ("import os; os.kill(os.getpid(), 11)", None, 11),
        ("raise ValueError('boom')", 1, None),
    ],
)
def test_how_a_rank_ended_is_seen_exactly(drive, script, status, signum):
    driver = drive(script)
    exited = driver.until("rank_exited")

    assert (exited["status"], exited["signal"]) == (status, signum)
    assert exited["oom"] is False
    driver.stop()
    assert driver.finish()["survivors"] == []


def test_without_an_order_a_failed_node_ends_itself(drive):
    driver = drive(
        "import os, sys, time; time.sleep(300 if os.environ['RANK'] == '1' else 0); sys.exit(3)", slots=(0, 1)
    )

    assert "no order came" in driver.until("stopping")["reason"]
    assert driver.finish()["survivors"] == []
    assert driver.until("rank_exited", rank=1)["signal"] == signal.SIGTERM


def test_stop_is_gentle_first_and_certain_in_the_end(drive):
    script = (
        "import signal, sys, time\n"
        "def bye(*_): print('saved', flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, bye); print('up', flush=True); time.sleep(300)\n"
    )
    driver = drive(script, slots=(0, 1))
    for rank in (0, 1):
        driver.until("output", rank=rank)
    driver.tell({"do": "stop", "grace": 20, "reason": "test"})
    driver.finish()

    assert driver.output(0) == b"up\nsaved\n"
    assert driver.until("rank_exited", rank=1)["status"] == 5


def test_a_rank_that_ignores_term_is_killed_after_the_grace(drive):
    script = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
    )
    driver = drive(script)
    driver.until("output", rank=0)
    driver.tell({"do": "stop", "grace": 1, "reason": "test"})

    assert driver.finish()["survivors"] == []
    assert driver.until("rank_exited")["signal"] == 9


def test_a_stopped_rank_ends_too(drive):
    driver = drive(SLEEP)
    driver.until("output", rank=0)
    os.kill(pids(driver)[0], signal.SIGSTOP)
    driver.tell({"do": "stop", "grace": 20, "reason": "test"})

    assert driver.finish()["survivors"] == []


def test_children_that_hide_are_found(drive):
    script = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(301)"], {})
    os._exit(0)
print("up", flush=True); time.sleep(1)
"""
    driver = drive(script)

    assert driver.finish()["survivors"] == []
    assert b"time.sleep(301)" not in b"".join(command_lines())


def command_lines():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as stream:
                    yield stream.read()
            except OSError:
                continue


def test_a_fork_storm_is_ended(drive):
    script = """
import os, time
print("up", flush=True)
end = time.time() + 60
while time.time() < end:
    if os.fork() == 0:
        time.sleep(0.02)
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
    time.sleep(0.01)
"""
    driver = drive(script)
    driver.until("output", rank=0)
    driver.tell({"do": "stop", "grace": 0, "reason": "test"})

    assert driver.finish()["survivors"] == []


def test_signals_go_to_the_ranks_only(drive):
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
        "print('up', flush=True)\n"
        "for _ in range(3000): time.sleep(0.1)\n"
    )
    driver = drive(script, slots=(0, 1))
    for rank in (0, 1):
        driver.until("output", rank=rank)
    driver.tell({"do": "signal", "signal": int(signal.SIGUSR1)})
    for rank in (0, 1):
        driver.until("output", rank=rank, data="usr1\n")
    driver.stop()
    driver.finish()


def test_fifty_megabytes_arrive_byte_for_byte_in_bounded_memory(drive):
    script = """
import hashlib, os, random, sys
random.seed(1)
block = bytes(random.getrandbits(8) for _ in range(100_000))
digest = hashlib.sha256()
for i in range(500):
    data = block[i:] + b"%d\\n" % i
    digest.update(data)
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
sys.stderr.write(digest.hexdigest())
"""
    driver = drive(script)
    agent = keeper(driver, "agent")
    peak = 0
    while True:
        message = driver.next()
        if message["event"] == "finished":
            break
        try:
            with open(f"/proc/{agent}/statm") as stream:
                peak = max(peak, int(stream.read().split()[1]) * 4096)
        except OSError:
            pass
    driver.finish()

    assert hashlib.sha256(driver.output(0)).hexdigest().encode() == driver.output(0, "err")
    assert peak < 120e6


def test_arguments_and_local_rank_byte_for_byte(drive, tmp_path):
    args = ["a b", "it's", "$HOME", "%h", "*", '{"k": [1]}', "new\nline", "", "\udcff", "é"]
    script = "import sys, os; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    argv = [sys.executable, "-u", str(tmp_path / "rank.py")]
    driver = drive(script, program={"argv": argv, "args": args, "local_rank": True})
    driver.finish()

    expected = ["--local_rank=0", *args]
    assert driver.output(0) == b"\0".join(a.encode("utf-8", "surrogateescape") for a in expected)


def test_a_program_that_cannot_run_says_so(drive):
    driver = drive("", program={"argv": ["/no/such/program"], "args": [], "local_rank": False})
    exited = driver.until("rank_exited")
    driver.stop()
    driver.finish()

    assert exited["status"] == 127
    assert b"can't run /no/such/program: No such file or directory" in driver.output(0, "err")


def test_a_missing_cwd_is_a_failed_start(drive):
    driver = drive("", cwd="/no/such/directory")

    assert "/no/such/directory" in driver.until("start_failed")["error"]
    assert driver.finish()["survivors"] == []


def test_environment_unset_and_set(drive, monkeypatch):
    for name in ("OMPI_X", "PLAIN", "KEPT"):
        monkeypatch.setenv(name, "1")
    names = ("OMPI_X", "PLAIN", "KEPT", "DS_ACCELERATOR", "NOT_SET")
    script = f"import os; print(*(os.environ.get(n) for n in {names}))"
    driver = drive(script, unset=["OMPI_*", "PLAIN", "DS_ACCELERATOR"], real=True)
    driver.finish()

    assert driver.output(0) == b"None None 1 cpu None\n"


def test_venv_script_activates_the_interpreter(drive, tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nFROM_VENV=1 exec {sys.executable} "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    (tmp_path / "my activate").write_text(f"export VIRTUAL_ENV={venv}; export EXTRA=yes\n")
    driver = drive(
        "import os; print(os.environ['FROM_VENV'], os.environ['EXTRA'])", venv_script="my activate"
    )
    driver.finish()

    assert driver.output(0) == b"1 yes\n"


def test_rank_log_dir(drive, tmp_path):
    driver = drive("print('hello')", rank_log_dir="logs")
    driver.finish()
    (name,) = os.listdir(tmp_path / "logs")

    assert name.endswith("_rank0.log")
    assert (tmp_path / "logs" / name).read_bytes() == b"hello\n"


@pytest.mark.parametrize("victim", ["relay", "relay and stdin"])
def test_a_broken_connection_loses_and_repeats_nothing(drive, victim):
    script = "import time\nfor i in range(60):\n    print(i, flush=True)\n    time.sleep(0.05)\n"
    driver = drive(script, reconnect_grace=30.0)
    driver.until("output", rank=0)
    if victim == "relay":
        driver.process.kill()
    else:
        driver.process.stdin.close()
    driver.until("eof")
    driver.seen = [m for m in driver.seen if m["event"] != "eof"]
    time.sleep(0.5)
    driver.attach()
    driver.finish()

    assert driver.output(0) == b"".join(b"%d\n" % i for i in range(60))
    assert driver.until("rank_exited")["status"] == 0


def test_a_launcher_that_stays_away_ends_the_run(drive):
    driver = drive(SLEEP, reconnect_grace=1.0, heartbeat=1.0)
    driver.until("output", rank=0)
    directory = driver.directory()
    agent, guardian = keeper(driver, "agent"), keeper(driver, "guardian")
    driver.process.kill()
    wait_for(lambda: not driver.left())
    wait_for(lambda: not os.path.exists(directory))
    for pid in (agent, guardian):
        wait_for(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))


def test_a_silent_launcher_ends_the_run_although_its_connection_stands(drive):
    driver = drive(SLEEP, reconnect_grace=1.0, heartbeat=1.0)
    driver.until("output", rank=0)
    driver.stop_pinging()

    assert "gone" in driver.until("stopping")["reason"]
    wait_for(lambda: not driver.left())


def test_kill_9_of_the_agent(drive):
    driver = drive(SLEEP, slots=(0, 1))
    for rank in (0, 1):
        driver.until("output", rank=rank)
    directory = driver.directory()
    os.kill(keeper(driver, "agent"), signal.SIGKILL)

    driver.until("agent_lost")
    wait_for(lambda: not driver.left())
    wait_for(lambda: not os.path.exists(directory))


def evidence(driver, rank=0):
    driver.tell({"do": "evidence", "id": 7, "ranks": [rank]})
    return driver.until("evidence", id=7, rank=rank)


def test_evidence_names_the_line_of_a_rank_and_of_its_children(drive):
    script = (
        "import multiprocessing, time\n"
        "def work():\n    print('up', flush=True)\n    time.sleep(300)  # child\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\nchild.start()\n"
        "child.join()\n"
    )
    driver = drive(script)
    driver.until("output", rank=0)
    found = evidence(driver)["processes"]

    assert [process["state"] for process in found] == ["S", "S"]
    assert 'rank.py", line 7 in <module>' in found[0]["stacks"]
    assert 'rank.py", line 4 in work' in found[1]["stacks"]
    driver.stop()
    driver.finish()


def test_evidence_never_kills_a_process_that_does_not_expect_it(drive):
    driver = drive("import os; print('up', flush=True); os.execv('/bin/sleep', ['sleep', '300'])")
    driver.until("output", rank=0)
    command = Path(f"/proc/{pids(driver)[0]}/cmdline")
    wait_for(lambda: command.read_bytes().startswith(b"sleep"))

    assert evidence(driver)["processes"][0]["stacks"] == ""
    driver.stop()
    driver.finish()
    assert driver.until("rank_exited")["signal"] == signal.SIGTERM


def test_progress_is_told_of_hooked_ranks_and_again_to_a_new_connection(drive):
    driver = drive(SLEEP, slots=(0, 1))
    driver.until("output", rank=1)

    def phases():
        rows = [message["ranks"] for message in driver.seen if message["event"] == "progress"]
        return {rank: row[rank]["mark"]["phase"] for row in rows for rank in row if row[rank]["mark"]}

    driver.until("progress")
    deadline = time.monotonic() + 20
    while phases() != {"0": "start", "1": "start"}:
        assert time.monotonic() < deadline
        driver.next()
    driver.process.kill()
    driver.until("eof")
    driver.seen.clear()
    driver.attach()
    assert set(driver.until("progress")["ranks"]) == {"0", "1"}
    driver.stop()
    driver.finish()


def test_kill_9_of_the_guardian_changes_nothing(drive):
    driver = drive(SLEEP)
    driver.until("output", rank=0)
    first = keeper(driver, "guardian")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: keeper(driver, "guardian") not in (first, None))
    os.kill(keeper(driver, "agent"), signal.SIGKILL)
    wait_for(lambda: not driver.left())


def test_kill_9_of_the_node_launcher(drive):
    driver = drive(SLEEP)
    driver.until("output", rank=0)
    os.kill(driver.until("launcher_started")["pid"], signal.SIGKILL)

    assert driver.until("launcher_exited")["signal"] == 9
    driver.stop()
    assert driver.finish()["survivors"] == []


def test_attach_without_an_agent(drive):
    driver = drive("pass")
    driver.finish()
    driver.seen.clear()
    driver.attach()

    assert driver.until("no_agent")["survivors"] == []


def test_two_runs_do_not_touch_each_other(drive):
    one, two = drive(SLEEP), drive(SLEEP)
    one.until("output", rank=0)
    two.until("output", rank=0)
    one.tell({"do": "stop", "grace": 5, "reason": "test"})
    one.finish()

    assert two.left()
    two.tell({"do": "stop", "grace": 5, "reason": "test"})
    two.finish()


def test_sweep_lists_and_ends_what_an_agent_left(drive):
    driver = drive(SLEEP)
    driver.until("output", rank=0)
    rows = [row for row in sweep()["found"] if row["run_id"] == driver.run_id]
    assert all(row["connected"] for row in rows)
    assert pids(driver)[0] in [row["pid"] for row in rows]
    assert sweep(spare=[driver.run_id])["found"] == [
        r for r in sweep()["found"] if r["run_id"] != driver.run_id
    ]

    ended = sweep(only=[driver.run_id], kill=True)

    assert ended["survivors"] == []
    assert not left_of(driver.run_id)
    assert not os.path.exists(driver.directory())


@pytest.mark.deepspeed
def test_the_real_node_launcher(drive):
    script = (
        "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', "
        "'MASTER_PORT', 'LOCAL_SIZE', 'CUDA_VISIBLE_DEVICES')))"
    )
    driver = drive(script, slots=(0, 2), real=True)
    driver.finish()

    for rank in (0, 1):
        assert driver.output(rank) == b"%d %d 2 127.0.0.1 29511 2 0,2\n" % (rank, rank)


@pytest.mark.deepspeed
def test_the_real_node_launcher_with_a_failing_rank(drive):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(300)\n"
    driver = drive(script, slots=(0, 1), real=True)

    assert driver.until("rank_exited", rank=1)["status"] == 3
    driver.stop()
    assert driver.finish()["survivors"] == []
