"""The main job without root: one sshd on two loopback addresses as two nodes, real DeepSpeed on them.

tests/cluster has the same and more on nodes of their own, where the machine allows that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sshd
from agent_driver import left_of, wait_for

pytestmark = [pytest.mark.sshd, pytest.mark.deepspeed]

WHO = "import os, sys; print('rank', os.environ['RANK'], sys.argv[1:], flush=True)\n"
SETTINGS = 'reconnect_grace = 2\n[checks]\n"hostfile.alias" = "warning"\n'


class Launches:
    def __init__(self, directory, server):
        self.directory = directory
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(server.home),
            "LANG": "C.UTF-8",
            "DS_ACCELERATOR": "cpu",
            "SAFELAUNCH_RUN_ROOT": str(directory / "runs"),
        }
        (directory / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
        (directory / "safelaunch.toml").write_text(SETTINGS)

    def start(self, script, *arguments):
        (self.directory / "t.py").write_text(script)
        return subprocess.Popen(
            [sys.executable, "-m", "safelaunch", *arguments],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def run_directory(self):
        return self.directory / "runs/latest"

    def outcome(self):
        return json.loads((self.run_directory / "outcome.json").read_text())

    def wait_for_ranks(self):
        logs = [self.run_directory / f"logs/rank-{rank}.out" for rank in (0, 1)]
        wait_for(lambda: all(log.exists() and "rank" in log.read_text() for log in logs))


@pytest.fixture
def launches(tmp_path):
    names = ["Host node1", "  HostName 127.0.0.2", "Host node2", "  HostName 127.0.0.3"]
    with sshd.Sshd(tmp_path / "sshd", ["127.0.0.2", "127.0.0.3"], config=names) as server:
        (tmp_path / "job").mkdir()
        yield Launches(tmp_path / "job", server)


def test_ranks_run_on_both_addresses_with_their_arguments(launches):
    process = launches.start(WHO, "t.py", "--hostfile", "hosts", "a b", "")
    out, err = process.communicate(timeout=90)

    assert process.returncode == 0, err
    arguments = ["--local_rank=0", "a b", ""]
    assert sorted(out.splitlines()) == [f"rank {rank} {arguments}" for rank in (0, 1)]
    assert launches.outcome()["status"] == "success"


def test_a_failing_rank_is_named_and_the_other_ended(launches):
    script = WHO + "import time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(300)\n"
    process = launches.start(script, "--hostfile", "hosts", "t.py")
    _, err = process.communicate(timeout=90)

    assert process.returncode == 3, err
    assert launches.outcome()["culprit"]["hosts"] == ["node2"]
    assert left_of(launches.run_directory.resolve().name) == []


def test_kill_9_of_safelaunch_leaves_nothing(launches):
    process = launches.start(WHO + "import time\ntime.sleep(300)\n", "--hostfile", "hosts", "t.py")
    launches.wait_for_ranks()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    run = launches.run_directory.resolve().name
    wait_for(lambda: left_of(run) == [], timeout=30)

    for command, status in ((["ps"], "launcher died"), (["clean"], "clean: 2 nodes")):
        done = launches.start("", *command)
        assert status in "".join(done.communicate(timeout=60))
        assert done.returncode == 0
