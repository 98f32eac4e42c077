"""What `ps` shows of our own command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from safelaunch.own_argv import hide_values
hide_values(sys.argv[1:])
print(open("/proc/self/cmdline").read().split(chr(0)), sys.argv[1:])
"""


@pytest.mark.parametrize(
    "words", [["--env", "TOKEN=s3cr3t"], ["--env=TOKEN=s3cr3t"], ["-x", "--env", "T=s3cr3t=1"]]
)
def test_values_of_env_are_hidden(words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, "train.py"], check=True, capture_output=True, text=True
    )
    shown, kept = done.stdout.split("] [")

    assert "s3cr3t" not in shown
    assert "T=" in shown or "TOKEN=" in shown
    assert "train.py" in shown
    assert "s3cr3t" in kept


def test_other_words_stay():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--env", "TOKEN", "s3cr3t"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.count("s3cr3t") == 2
