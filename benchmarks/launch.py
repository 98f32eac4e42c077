"""From command to first rank on two test-bed nodes: safelaunch (quick preflight) against `deepspeed`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from timing import Row, interleaved

if TYPE_CHECKING:
    from collections.abc import Sequence

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTBED = os.path.join(REPO, "scripts", "testbed")
SCRIPT = "print('first line of a rank', flush=True)\n"
LIMIT = 120
"""Seconds a launch may take before the benchmark gives up."""


def first_rank(command: Sequence[str], env: dict[str, str], cwd: str) -> float:
    """Return the seconds until a rank's first line is on our side; the job must then end with 0."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=cwd, text=True
    )
    seconds = None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "first line of a rank" in line and seconds is None:
            seconds = time.perf_counter() - started
    if process.wait(timeout=LIMIT) != 0 or seconds is None:
        raise RuntimeError(f"{command} exited with {process.returncode}:\n{''.join(lines)}")
    return seconds


def measure(rounds: int, directory: str) -> list[Row]:
    """Boot a two-node bed below `directory`, measure, and take it down again."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "SAFELAUNCH_RUN_ROOT": os.path.join(directory, "runs")}
    bed = [TESTBED, "--dir", os.path.join(directory, "bed")]
    work = os.path.join(directory, "work")
    os.makedirs(work)
    with open(os.path.join(work, "hosts"), "w") as stream:
        stream.write("node1 slots=2\nnode2 slots=2\n")
    with open(os.path.join(work, "train.py"), "w") as stream:
        stream.write(SCRIPT)
    programs = os.path.dirname(sys.executable)
    head = [*bed, "head"]
    commands = {
        "safelaunch --preflight quick": [
            *head,
            os.path.join(programs, "safelaunch"),
            "--preflight",
            "quick",
            "--hostfile",
            "hosts",
            "train.py",
        ],
        "safelaunch": [*head, os.path.join(programs, "safelaunch"), "--hostfile", "hosts", "train.py"],
        "deepspeed (pdsh)": [*head, os.path.join(programs, "deepspeed"), "--hostfile", "hosts", "train.py"],
    }
    subprocess.run([*bed, "up", "--nodes", "2"], check=True, env=env, stdout=subprocess.DEVNULL)
    try:
        medians = interleaved(
            {
                name: lambda command=command: first_rank(command, env, work)
                for name, command in commands.items()
            },
            rounds,
        )
    finally:
        subprocess.run([*bed, "down"], check=True, env=env, stdout=subprocess.DEVNULL)
    stock = medians["deepspeed (pdsh)"]
    ratio = medians["safelaunch --preflight quick"] / stock
    peers = {f"{name} (s)": seconds for name, seconds in medians.items()}
    return [
        Row(
            name="command to first rank, 2 nodes x 2, ratio to deepspeed",
            value=ratio,
            unit="x",
            bound=1.0,
            peers=peers,
        )
    ]
