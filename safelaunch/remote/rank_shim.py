"""Stands between DeepSpeed's node launcher and a rank: sets up its output, then becomes the rank.

`deepspeed.launcher.launch` starts `<python> -I rank_shim.py DIRECTORY` once a rank; the shim executes what
DeepSpeed would have started itself, with the same pid, so exit codes and signals go where they always went.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    directory = sys.argv[1]
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    with open(os.path.join(directory, "launch.json"), encoding="utf-8", errors="surrogateescape") as stream:
        program = json.load(stream)
    for fd, name in ((1, "out"), (2, "err")):
        path = os.path.join(directory, "rank-%d.%s" % (rank, name))
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    record(directory, rank, local_rank)

    words = list(program["argv"])
    if program["hook"]:
        os.environ["SAFELAUNCH_MARK"] = os.path.join(directory, "rank-%d" % rank)
        rest = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = directory if not rest else directory + os.pathsep + rest
    python = os.environ.pop("SAFELAUNCH_PYTHON", None)
    if python and words[0] == program["python"]:
        words[0] = python
    if program["local_rank"]:
        words.append("--local_rank=%d" % local_rank)
    # Bytes, so that no locale can change what the user typed.
    argv = [word.encode("utf-8", "surrogateescape") for word in words + program["args"]]
    # Python ignores SIGPIPE and SIGXFSZ; a program that is executed would inherit that.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell may touch the user's arguments
    except OSError as error:
        os.write(2, b"safelaunch: rank %d can't run %s: %s\n" % (rank, argv[0], str(error.strerror).encode()))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def record(directory: str, rank: int, local_rank: int) -> None:
    """Tell the agent who we are; the start time makes the pid unmistakable."""
    with open("/proc/self/stat", "rb") as stream:
        started = int(stream.read().rpartition(b") ")[2].split()[19])
    path = os.path.join(directory, "rank-%d.json" % rank)
    with open(path + ".new", "w", encoding="ascii") as stream:
        json.dump({"rank": rank, "local_rank": local_rank, "pid": os.getpid(), "started": started}, stream)
    os.replace(path + ".new", path)


main()
