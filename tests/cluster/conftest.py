"""Fixtures on a real cluster: one test bed for the whole session, healed and swept after each test."""

import contextlib
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from testbed import NOBODY_LEFT, Bed, SafeLaunch

NODES = 4


@pytest.fixture(scope="session")
def running_bed():
    """Four nodes, booted once; gone at the end of the session."""
    # Not below /tmp: that is each node's own.
    directory = Path(tempfile.mkdtemp(prefix="safelaunch-tests-", dir="/var/tmp")) / "bed"
    bed = Bed(directory)
    try:
        bed.tool("up", "--nodes", NODES)
        yield bed
    finally:
        bed.tool("down")
        directory.parent.rmdir()


@pytest.fixture
def bed(running_bed):
    """The cluster, healthy; faults end with the test, and so must every process of its runs."""
    yield running_bed
    for node in running_bed.status["nodes"]:
        if node["pid"] is None:
            running_bed.tool("node-up", node["name"].removeprefix("node"))
    running_bed.heal()
    left = running_bed.wait_until_nobody_is_left(NOBODY_LEFT)
    for survivor in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(survivor.pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def safelaunch(bed, request):
    """Runs safelaunch as the cluster's user, in a shared directory of this test's own."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:60]
    cwd = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=bed.shared))
    cwd.chmod(0o755)
    runner = SafeLaunch(bed, cwd)
    runner.write("hosts", "node1 slots=2\nnode2 slots=2\n")
    yield runner
    runner.stop_all()
    shutil.rmtree(cwd, ignore_errors=True)
