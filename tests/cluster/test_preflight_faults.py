"""What a preflight sees on nodes that it does reach: each fault made for real on one node of three."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from checked import check

pytestmark = [pytest.mark.cluster]

THREE = "node1 slots=2\nnode2 slots=2\nnode3 slots=2\n"


@pytest.fixture
def job(safelaunch):
    """A training script with a module of its own and a config, to be checked on three nodes."""
    safelaunch.write("hosts", THREE)
    safelaunch.write("train.py", "import model\n")
    safelaunch.write("model.py", "layers = 2\n")
    safelaunch.write("ds.json", '{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}\n')
    return safelaunch


def test_a_healthy_bed(job):
    found = check(job, "train.py", "--deepspeed_config", "ds.json")

    (only,) = found.document["findings"]
    assert (only["code"], only["severity"], only["hosts"]) == (
        "gpu.none",
        "warning",
        ["node1", "node2", "node3"],
    )
    assert found.status == 0
    assert found.failed == []
    assert check(job, "--env", "DS_ACCELERATOR=cpu").document["findings"] == []


@pytest.mark.parametrize(
    ("node", "seconds", "words"),
    [
        (2, 100, "its clock is 100.0 s ahead"),
        (1, -3600, "its clock is 60 min behind"),
        (2, 5.5, "its clock is 5.5 s ahead"),
    ],
)
def test_clock(job, node, seconds, words):
    job.bed.fault("clock-skew", node, seconds)
    found = check(job)

    judged = found.is_error if abs(seconds) > 30 else found.is_warning
    judged("clock.skew", f"node{node}", why=words, fix="chronyc makestep")


def test_own_name(job):
    job.bed.fault("loopback-hostname", 2)
    address = job.bed.address(2)

    check(job).is_error(
        "net.own_name_loopback", "node2", why="resolves to 127.0.1.1", fix=f"/etc/hosts: {address} node2"
    )
    check(job, "--env", "GLOO_SOCKET_IFNAME=eth0").is_warning("net.own_name_loopback", "node2")


def test_names_of_peers(job):
    job.bed.fault("unknown-name", 2, 3)

    check(job).is_error("net.name_resolution", "node2", why="node3: unknown there", fix="getent ahosts node3")


def test_shared_memory(job):
    job.bed.fault("small-shm", 2)
    job.bed.fault("small-shm", 3, "512m")
    fatal, small = check(job).findings

    assert (fatal["code"], fatal["severity"], fatal["hosts"]) == ("shm.small", "error", ["node2"])
    assert (small["code"], small["severity"], small["hosts"]) == ("shm.small", "warning", ["node3"])
    assert "64 MiB of 64 MiB free in /dev/shm, for 2 ranks" in fatal["observed"]
    assert "remount,size=16g /dev/shm" in fatal["fix"]


def test_full_disk(job):
    job.bed.fault("full-tmp", 2)

    check(job).is_error("storage.full", "node2", why="for temporary files in /tmp", fix="df -h /tmp")


def test_full_disk_elsewhere(job):
    """What the settings and the user's variables name is looked at too."""
    job.bed.fault("small-shm", 2, "2m")
    job.write("safelaunch.toml", 'checkpoint_dirs = ["/dev/shm/checkpoints"]\n')
    found = check(job)

    assert {finding["code"] for finding in found.findings} == {"shm.small", "storage.full"}
    (full,) = (f for f in found.findings if f["code"] == "storage.full" and f["severity"] == "error")
    assert full["hosts"] == ["node2"]
    assert "checkpoints in /dev/shm/checkpoints" in full["observed"]


@pytest.mark.parametrize("role", ["cwd", "script", "interpreter"])
def test_a_path_that_is_not_there(job, role):
    path = {"cwd": job.cwd, "script": job.cwd / "train.py", "interpreter": Path(sys.executable)}[role]
    job.bed.fault("hidden-path", 2, path)

    check(job, "train.py").is_error(
        f"path.{role}",
        "node2",
        why=f"{path} does not exist; what exists of it is {path.parent}",
        fix="rsync -a ",
    )


@pytest.mark.parametrize("file", ["train.py", "model.py"])
def test_other_code(job, file):
    job.bed.fault("different-file", 2, job.cwd / file)

    check(job, "train.py").is_error(
        "code.differs", "node2", why=f"{file}: node[1,3] / node2", fix=f"rsync -a {job.cwd}/ node2:"
    )


def test_code_of_two_nodes_that_differ(job):
    """Two have no majority: both are named."""
    job.write("hosts", "node1 slots=2\nnode2 slots=2\n")
    job.bed.fault("different-file", 2, job.cwd / "train.py")

    check(job, "train.py").is_error("code.differs", "node1", "node2", why="train.py: node1 / node2")


def test_other_config(job):
    config = job.cwd / "ds.json"
    job.bed.fault("different-file", 2, config)
    job.bed.fault("hidden-path", 3, config)
    found = check(job, "train.py", "--deepspeed_config", "ds.json")

    assert found.status == 69
    assert [(f["code"], f["severity"]) for f in found.findings] == [("config.differs", "error")] * 2
    lacking, other = found.findings
    assert lacking["hosts"] == ["node3"]
    assert lacking["observed"] == f"{config}: No such file or directory"
    assert lacking["fix"] == f"rsync -a {config} node3:{config}"
    assert other["hosts"] == ["node1", "node2"]
    assert "has 2 contents" in other["observed"]


@pytest.mark.deepspeed
def test_other_deepspeed(job):
    version = metadata.version("deepspeed")
    site = Path(sysconfig.get_path("purelib"))
    job.bed.fault("hidden-path", 2, site / f"deepspeed-{version}.dist-info")

    check(job).is_error("software.deepspeed", "node2", fix=f"-m pip install deepspeed=={version}")


def test_a_pair_that_is_cut(job):
    """The node that can't reach the master is named; two that are no masters may be cut for all we test."""
    job.bed.fault("pair-cut", 2, 1)
    address = job.bed.address(1)

    check(job).is_error(
        "net.master_unreachable", "node2", why=f"can't connect to node1 at {address}:29500", fix="on node1: "
    )


@pytest.mark.parametrize(
    ("fault", "words"), [("refuse-port", "Connection refused"), ("drop-port", "no answer")]
)
def test_a_closed_master_port(job, fault, words):
    job.bed.fault(fault, 1, 29511)

    check(job, "--master_port", "29511").is_error(
        "net.master_unreachable", "node2", "node3", why=words, fix="--add-port=29511/tcp"
    )


def test_a_busy_master_port(job):
    job.bed.fault("port-busy", 1, 29500)
    job.bed.fault("port-busy", 2, 29500)  # of no concern there

    assert check(job).findings == []
    check(job, "--master_port", "29500").is_error(
        "port.busy", "node1", why="impostor.py silent 0.0.0.0 29500", fix="or leave --master_port out"
    )


def test_two_names_of_one_node(job):
    address = job.bed.address(1)
    job.write("hosts", f"node1 slots=2\n{address} slots=2\nnode2 slots=2\n")
    found = check(job)

    found.is_error("hostfile.alias", "node1", address, why="the same boot id", fix=f"leave out {address}")
    assert found.finding["where"] == {"file": "hosts", "line": 2, "column": 1}


@pytest.mark.parametrize("identity", ["machine-id", "boot-id"])
def test_nodes_with_one_identity(job, identity):
    job.bed.fault("clone", 2, 3, identity)

    check(job).is_error(
        "identity.duplicate",
        "node2",
        "node3",
        why=f"the same {identity.replace('-', ' ')}",
        fix="all but one",
    )


LEFT = """
import socket, sys, time
if "listen" in sys.argv:
    server = socket.create_server(("", 29500))
open(sys.argv[1], "w").close()
time.sleep(100)
"""


@pytest.fixture
def leave(job):
    """Leaves a process behind on a node; it ends with the test."""
    script = job.write("left.py", LEFT)
    left = []

    def leave(node, *words, **environment):
        ready = job.cwd / f"ready-{len(left)}"
        start = f'env "$@" >/dev/null 2>&1 & until [ -e {ready} ]; do sleep 0.02; done'
        settings = [f"{name}={value}" for name, value in environment.items()]
        job.bed.sh(node, "sh", "-c", start, "sh", *settings, sys.executable, str(script), str(ready), *words)
        left.append(job.bed.pid(node, f"{script} {ready}"))

    yield leave
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_what_is_left_of_another_run(job, leave):
    leave(2, SAFELAUNCH_RUN_ID="20260101-left", RANK="3")

    check(job).is_warning(
        "process.leftover",
        "node2",
        why="(rank 3) of 20260101-left",
        fix="safelaunch clean --hostfile hosts",
    )


def test_a_rank_that_nobody_knows(job, leave):
    leave(2, RANK="1", WORLD_SIZE="2", MASTER_PORT="29500")

    check(job).is_warning("process.leftover", "node2", why="another job of yours", fix="on the node: kill ")


def test_a_left_rank_that_holds_the_port(job, leave):
    leave(1, "listen", SAFELAUNCH_RUN_ID="20260101-left", RANK="0")
    held = check(job, "--master_port", "29500")

    assert held.status == 69
    assert held.failed == ["node1"]
    errors = {finding["code"]: finding for finding in held.findings}
    assert {code: f["severity"] for code, f in errors.items()} == {
        "port.busy": "error",
        "process.leftover": "error",
    }
    assert "holding the master port" in errors["process.leftover"]["observed"]
    assert "safelaunch clean" in errors["process.leftover"]["fix"]
    # Without a port of the user's own another one is taken.
    check(job).is_warning("process.leftover", "node1")


def test_the_users_settings_decide(job):
    job.bed.fault("small-shm", 2)
    job.write("safelaunch.toml", '[checks]\n"shm.small" = "warning"\n')
    check(job).is_warning("shm.small", "node2")
    job.write("safelaunch.toml", '[checks]\n"shm.*" = "off"\n')

    assert check(job).findings == []


def test_a_node_that_is_not_reached_hides_no_other(job):
    """The fault of one node and that of another are both reported; what rests on the first is not."""
    job.bed.fault("small-shm", 2)
    job.bed.fault("no-sshd", 3)
    found = check(job)

    assert [(f["code"], f["hosts"]) for f in found.findings] == [
        ("ssh.refused", ["node3"]),
        ("shm.small", ["node2"]),
    ]
    assert found.failed == ["node2", "node3"]
