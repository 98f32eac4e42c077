"""The real sshd of scripts/bed, where tests and benchmarks find it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from bed.sshd import LISTEN_MAX, SSHD, Sshd, free_port, kill, make_key, missing

__all__ = ["LISTEN_MAX", "SSHD", "Sshd", "free_port", "kill", "make_key", "missing"]
