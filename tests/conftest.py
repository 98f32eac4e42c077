"""What every test gets: markers that skip by name, with the reason, and an environment without leftovers."""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import sshd

REPOSITORY = Path(__file__).resolve().parents[1]


@cache
def no_bed() -> str | None:
    """Say why there can be no test bed on this machine, or None."""
    tool = [sys.executable, REPOSITORY / "scripts/testbed", "check"]
    done = subprocess.run(tool, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() if done.returncode else None


@cache
def no_deepspeed() -> str | None:
    return None if importlib.util.find_spec("deepspeed") else "deepspeed is not installed: make setup"


REASONS = {"cluster": no_bed, "sshd": sshd.missing, "deepspeed": no_deepspeed}
"""For each marker, what says why its tests can't run here."""

LAUNCHERS = ("SAFELAUNCH_", "SLURM_", "OMPI_", "PMI_", "DS_")
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


def pytest_runtest_setup(item):
    for marker, reason in REASONS.items():
        if item.get_closest_marker(marker) is not None:
            why = reason()
            if why is not None:
                pytest.skip(f"{marker}: {why}")


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch):
    """Keep what an outer job or the developer's shell has set from changing what a test sees."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in RENDEZVOUS:
            monkeypatch.delenv(name)
