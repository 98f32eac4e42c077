"""`make demo` shows what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.cluster
@pytest.mark.deepspeed
@pytest.mark.timeout(300)
def test_the_demo_shows_its_three_scenes():
    done = subprocess.run(
        [ROOT / "scripts/demo"],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    said = done.stdout
    assert done.returncode == 0, said
    command = "$ safelaunch train.py --hostfile hosts --deepspeed_config ds.json\n"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    scenes = [
        "error: hostfile.syntax",
        "(exit status 78)",
        command,
        "all 4 ranks on 2 nodes exited 0",
        "(exit status 0)",
        "FAILED: rank 3 on node2 exited with status 1",
        "(exit status 1)",
        "node1: none\nnode2: none\n",
    ]
    places = [said.find(text) for text in scenes]
    assert -1 not in places, said
    assert places == sorted(places)
    directory = said.partition("test bed in ")[2].partition("/bed,")[0]
    assert directory.startswith("/var/tmp/safelaunch-demo-")
    assert not Path(directory).exists()
