"""Stacks as faulthandler writes them: reading, finding the user's line, grouping ranks by equal ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')
NOT_THE_USERS = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python3|/sitecustomize\.py$|^<frozen |^<string>"
)
"""Files that belong to Python, to installed packages, or to our hook."""
_COLLECTIVE = re.compile(
    r"/sitecustomize\.py$|/torch/distributed/(distributed_c10d|c10d_logger|rendezvous)\.py$|/deepspeed/comm/"
)
_DATA_LOADER = "torch/utils/data/dataloader.py"
_LOCKS = ("torch/utils/file_baton.py", "/filelock/")


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int | None
    function: str

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}" if self.line is not None else self.file

    @property
    def is_users(self) -> bool:
        """Whether it is neither Python's nor an installed package's."""
        return not NOT_THE_USERS.search(self.file)


Stack = tuple[Frame, ...]
"""Innermost frame first."""


def parse(text: str) -> list[Stack]:
    """Return the stack of each thread that faulthandler wrote; the main thread's is the last one."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
            continue
        frame = _FRAME.match(line)
        if frame and threads:
            number = int(frame["line"]) if frame["line"].isdigit() else None
            threads[-1].append(Frame(frame["file"], number, frame["function"]))
    return [tuple(thread) for thread in threads]


def main_thread(text: str) -> Stack:
    """Return the main thread's stack, or an empty one."""
    threads = parse(text)
    return threads[-1] if threads else ()


def users_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of the user's own code, else the innermost one, else None."""
    return next((frame for frame in stack if frame.is_users), stack[0] if stack else None)


def is_in_collective(stack: Stack) -> bool:
    """Tell whether a stack stands in a call to other ranks: in what our hook wraps, or in what calls that."""
    return bool(stack) and bool(_COLLECTIVE.search(stack[0].file))


def waits_for_loader(stack: Stack) -> bool:
    """Tell whether a stack stands in torch's DataLoader, waiting for a worker."""
    users = next((index for index, frame in enumerate(stack) if frame.is_users), len(stack))
    return any(frame.file.endswith(_DATA_LOADER) for frame in stack[:users])


def waits_for_lock(stack: Stack) -> bool:
    """Tell whether a stack waits for a lock file, as while another process compiles an extension."""
    return any(part in frame.file for frame in stack for part in _LOCKS)


def grouped(by_rank: Mapping[int, Stack]) -> list[tuple[list[int], Stack]]:
    """Return ranks with equal stacks together, the smallest groups first: the odd one out is on top."""
    groups: dict[Stack, list[int]] = {}
    for rank, stack in sorted(by_rank.items()):
        groups.setdefault(stack, []).append(rank)
    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=lambda row: (len(row[0]), row[0]))
