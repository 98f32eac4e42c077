"""What is read of the machine that safelaunch runs on: files, devices, modules.

Nothing is written, and no module of the user's is imported.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import re
import shutil
import stat as stat_bits
import subprocess
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec

LARGEST = 16 << 20
"""Bytes of a file that are read; hostfiles and configs are far smaller."""
_TOOL_SECONDS = 10.0
_PORTS = (32_768, 60_999)
"""Linux's default of net.ipv4.ip_local_port_range."""
_MODULE = re.compile(r"\w+(\.\w+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A view of this machine, from a directory and with an environment."""

    cwd: str
    home: str
    environ: Mapping[str, str]

    def path(self, name: str) -> str:
        """Return the absolute path of a name."""
        return os.path.normpath(os.path.join(self.cwd, name))

    def read(self, name: str) -> bytes:
        """Return what a file, pipe or device holds; raises OSError, also for one over LARGEST.

        Each call reads anew, and a pipe can be read only once.
        """
        try:
            with open(self.path(name), "rb") as stream:
                data = stream.read(LARGEST + 1)
        except ValueError as error:  # a name that no file can have
            raise OSError(errno.EINVAL, str(error)) from error
        if len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST >> 20} MiB")
        return data

    def read_start(self, name: str) -> bytes:
        """Return the first 4 KiB of a file; raises OSError."""
        with open(self.path(name), "rb") as stream:
            return stream.read(4096)

    def read_if_there(self, name: str) -> bytes | None:
        """Return a file's content, None where there is none; raises OSError where it can't be read."""
        try:
            return self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stat(self, name: str) -> os.stat_result | None:
        """Return what is known of a file, None where there is none that we can see, or no name."""
        try:
            return os.stat(self.path(name)) if name else None
        except (OSError, ValueError):
            return None

    def is_file(self, name: str) -> bool:
        """Whether there is a regular file of that name."""
        status = self.stat(name)
        return status is not None and stat_bits.S_ISREG(status.st_mode)

    def is_folder(self, name: str) -> bool:
        """Whether there is a directory of that name."""
        status = self.stat(name)
        return status is not None and stat_bits.S_ISDIR(status.st_mode)

    def may_run(self, name: str) -> bool:
        """Whether we may execute a file."""
        return os.access(self.path(name), os.X_OK)

    def near(self, name: str) -> list[str]:
        """Return up to three names like one that is missing: in its directory, or with that one corrected."""
        folder, base = os.path.split(name)
        try:
            beside = os.listdir(self.path(folder))
        except (OSError, ValueError):
            near = self.near(folder) if folder and folder != name else []
            fixed = [os.path.join(other, base) for other in near]
            return [path for path in fixed if self.stat(path) is not None] or fixed
        stem = os.path.splitext(base)[0]
        alike = [other for other in beside if os.path.splitext(other)[0].lower() == stem.lower()]
        alike += difflib.get_close_matches(base, beside[:5000], n=3)
        return [os.path.join(folder, other) for other in dict.fromkeys(alike)][:3]

    def program(self, name: str) -> str | None:
        """Return the path of a program that is looked up on PATH, None where there is none."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath))

    def module(self, name: str) -> bool:
        """Whether `python -m NAME` would find something to run, found without importing anything."""
        if not _MODULE.fullmatch(name):
            return False
        top, *rest = name.split(".")
        spec = self._find(top)
        for index, part in enumerate([*rest, "__main__"]):
            if spec is None:
                return False
            if spec.submodule_search_locations is None:
                return index == len(rest)
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        return spec is not None

    def package(self, name: str) -> bool:
        """Whether a top-level module is there, found without importing it."""
        return self._find(name) is not None

    def _find(self, top: str) -> ModuleSpec | None:
        python_path = [part or "." for part in self.environ.get("PYTHONPATH", "").split(os.pathsep)]
        spec = PathFinder.find_spec(top, [self.cwd, *(self.path(part) for part in python_path)])
        if spec is None:
            try:
                spec = importlib.util.find_spec(top)  # of a top-level name this imports nothing
            except (ImportError, ValueError):
                return None
        return spec

    def ephemeral_ports(self) -> tuple[int, int]:
        """Return the first and the last port that Linux hands out to outgoing connections."""
        try:
            low, high = self.read("/proc/sys/net/ipv4/ip_local_port_range").split()
            return int(low), int(high)
        except (OSError, ValueError):
            return _PORTS

    def gpus(self) -> int | None:
        """Count the GPUs of NVIDIA or AMD; None where none is found or the tool does not answer."""
        listed = _output(["nvidia-smi", "-L"], self.environ)
        count = sum(line.startswith("GPU ") for line in listed)
        return count or self._kfd_gpus() or None

    def _kfd_gpus(self) -> int:
        root = "/sys/class/kfd/kfd/topology/nodes"
        try:
            return sum(self.read(f"{root}/{node}/gpu_id").strip() != b"0" for node in os.listdir(root))
        except OSError:
            return 0

    def numa_nodes(self) -> int:
        """Count NUMA nodes with CPUs: DeepSpeed's devices without a GPU (accelerator/cpu_accelerator.py)."""
        listed = _output(["numactl", "--hardware"], self.environ)
        cpus = [line.partition(":")[2] for line in listed if re.match(r"node \d+ cpus:\s*\d", line)]
        return max(1, len(set(cpus)))


def _output(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            timeout=_TOOL_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []
    return result.stdout.decode(errors="replace").splitlines() if result.returncode == 0 else []
