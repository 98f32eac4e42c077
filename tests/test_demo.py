"""`make demo` shows what it promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


COMMAND = "$ safelaunch train.py --hostfile hosts --deepspeed_config ds.json\n"
SCENES = [
    "error: hostfile.syntax",
    "(exit status 78)",
    COMMAND,
    "all 4 ranks on 2 nodes exited 0",
    "(exit status 0)",
    "FAILED: rank 3 on node2 exited with status 1",
    "(exit status 1)",
]

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(300)]


def run(*prefix):
    done = subprocess.run(
        [*prefix, ROOT / "scripts/demo"],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def in_this_order(texts, said):
    places = [said.find(text) for text in texts]
    return -1 not in places and places == sorted(places)


def test_it_runs_what_the_readme_shows():
    assert COMMAND in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.cluster
def test_three_scenes_on_two_nodes():
    said = run()
    assert in_this_order([*SCENES, "node1: none\nnode2: none\n"], said), said
    directory = said.partition("test bed in ")[2].partition("/bed,")[0]
    assert directory.startswith("/var/tmp/safelaunch-demo-")
    assert not Path(directory).exists()


@pytest.mark.sshd
def test_the_same_scenes_without_the_rights_for_a_test_bed():
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root, and no setpriv to drop rights with")
    drop = ["setpriv", "--bounding-set=-sys_admin,-net_admin"] if os.geteuid() == 0 else []
    said = run(*drop)
    assert in_this_order(["Left out: ", "hostfile.alias", *SCENES, "this machine: none\n"], said), said
    directory = said.partition("run directory ")[2].partition("/runs/")[0]
    assert directory.startswith("/var/tmp/safelaunch-demo-")
    assert not Path(directory).exists()
