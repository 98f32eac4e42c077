"""From the state of an ended job to its outcome: what happened, who is at fault, and the exit status."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safelaunch.stacks import NOT_THE_USERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safelaunch.job import Failure, Job
    from safelaunch.verdicts import Verdict

LOST, INTERNAL, HANG, DESYNC = 74, 70, 75, 76
"""Exit statuses after sysexits.h: EX_IOERR, EX_SOFTWARE, EX_TEMPFAIL, EX_PROTOCOL."""

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')

_LAUNCHER = "the node launcher (deepspeed.launcher.launch)"

_SIGNAL_HINTS = {
    signal.SIGBUS: "a bus error is most often /dev/shm or a disk that is full",
    signal.SIGSEGV: "a crash in native code; its Python stack is in the rank's log (PYTHONFAULTHANDLER)",
    signal.SIGKILL: "somebody or the kernel killed it: look for the out-of-memory killer on that node",
    signal.SIGABRT: "an abort in native code: the lines before it in the rank's log say why",
}


@dataclass(frozen=True, slots=True)
class Traceback:
    """A Python traceback: the whole text, its last line, and the innermost line of the user's code."""

    text: str
    error: str
    location: str | None


def last_traceback(text: str) -> Traceback | None:
    """Return the last traceback of a log, or None; of chained ones the last is what ended the process."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.endswith(_HEADER)]
    if not starts:
        return None
    start = starts[-1]
    indent = len(lines[start]) - len(_HEADER)
    frames = []
    end = start + 1
    while end < len(lines) and (lines[end][indent:].startswith(" ") or not lines[end].strip()):
        frame = _FRAME.match(lines[end][indent:])
        if frame:
            frames.append(frame)
        end += 1
    error = lines[end][indent:] if end < len(lines) else ""
    users = [frame for frame in frames if not NOT_THE_USERS.search(frame["file"])]
    inner = (users or frames)[-1] if frames else None
    location = f"{inner['file']}:{inner['line']}" if inner else None
    return Traceback("\n".join(line[indent:] for line in lines[start : end + 1]), error.strip(), location)


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; a number that has no name as `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome(
    job: Job, logs: Mapping[int, str], node_logs: Mapping[str, str], verdict: Verdict | None = None
) -> dict[str, Any]:
    """Return status, exit status, summary, culprit and what goes with them, as outcome.json has them.

    `logs` holds the tail of the stderr of ranks that failed, `node_logs` the tail of node launchers' logs.
    `verdict` is what lies behind the first failure, where the ranks' marks tell.
    """
    cause = job.root_cause()
    verdict = verdict or (cause.verdict if cause is not None else None)
    if cause is not None:
        failed = {**_failed(job, cause, logs, node_logs), "others": _others(job, cause)}
        return failed if verdict is None else {**failed, **_judged(cause, verdict)}
    if job.interrupted is not None:
        name = signal_name(job.interrupted)
        summary = f"stopped by {name}; {_what_is_left(job)}"
        return {
            **_NO_CULPRIT,
            "status": "interrupted",
            "exit_status": 128 + job.interrupted,
            "summary": summary,
        }
    unseen = [rank.rank for rank in job.ranks.values() if rank.exit is None or rank.exit.code is None]
    if unseen or any(node.launcher is None for node in job.nodes.values()):
        names = ", ".join(map(str, unseen)) or "none"
        summary = f"the run ended, but how ranks {names} ended was not seen: that is no success"
        culprit = {**_EMPTY_CULPRIT, "ranks": unseen, "reason": "unknown"}
        return {
            **_NO_CULPRIT,
            "status": "failed",
            "exit_status": INTERNAL,
            "summary": summary,
            "culprit": culprit,
        }
    ranks, nodes = len(job.ranks), len(job.nodes)
    summary = f"all {ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)} exited 0"
    return {**_NO_CULPRIT, "status": "success", "exit_status": 0, "summary": summary}


def _what_is_left(job: Job) -> str:
    if job.survivors:
        return f"processes on {', '.join(job.survivors)} could not be ended"
    if job.unconfirmed:
        return f"nobody could look whether all processes on {', '.join(job.unconfirmed)} ended"
    return "every rank was ended"


_EMPTY_CULPRIT: dict[str, Any] = {
    "ranks": [],
    "hosts": [],
    "reason": "unknown",
    "location": None,
    "since": None,
}
_NO_CULPRIT: dict[str, Any] = {"culprit": None, "first_failure": None, "others": []}


_OUT_OF_STEP = ("collective_mismatch", "missed_collective")


def _judged(cause: Failure, verdict: Verdict) -> dict[str, Any]:
    desync = verdict.reason in _OUT_OF_STEP
    failed = {} if cause.exit is not None else {"first_failure": None}
    return {
        **failed,
        "status": "desync" if desync else "hang",
        "exit_status": DESYNC if desync else HANG,
        "summary": verdict.text,
        "culprit": {
            "ranks": list(verdict.ranks),
            "hosts": list(verdict.hosts),
            "reason": verdict.reason,
            "location": verdict.location,
            "since": cause.time,
        },
        "others": [{"what": what, "ranks": list(ranks)} for what, ranks in verdict.others],
        "reasons": list(verdict.votes),
    }


def _failed(
    job: Job, cause: Failure, logs: Mapping[int, str], node_logs: Mapping[str, str]
) -> dict[str, Any]:
    unreachable = cause.reason == "node_unreachable"
    text = logs.get(cause.rank, "") if cause.rank is not None else node_logs.get(cause.host, "")
    by_signal = cause.exit is not None and bool(cause.exit.signal)
    # A killed process did not die of a traceback that it printed before.
    traceback = None if by_signal or unreachable else last_traceback(text)
    code = cause.exit.code if cause.exit is not None else None
    summary = _sentence(job, cause)
    if traceback is not None:
        place = f" at {traceback.location}" if traceback.location else ""
        summary += f"{place}: {traceback.error}"
    return {
        "status": "node_lost" if unreachable else "failed",
        "exit_status": LOST if unreachable else code or INTERNAL,
        "summary": summary,
        "culprit": {
            "ranks": [] if cause.rank is None else [cause.rank],
            "hosts": [cause.host],
            "reason": cause.reason,
            "location": traceback.location if traceback else None,
            "since": cause.time,
        },
        "first_failure": {
            "rank": cause.rank,
            "host": cause.host,
            "pid": job.ranks[cause.rank].pid if cause.rank is not None else None,
            "time": cause.time,
            "status": cause.exit.status if cause.exit else None,
            "signal": cause.exit.signal if cause.exit else None,
            "traceback": traceback.text if traceback else None,
            "error": traceback.error if traceback else cause.text or None,
            "hint": hint(cause),
        },
    }


def _sentence(job: Job, cause: Failure) -> str:
    where = f"rank {cause.rank} on {cause.host}" if cause.rank is not None else f"node {cause.host}"
    end = cause.exit
    if cause.reason == "node_unreachable":
        return f"contact to node {cause.host} was lost: {cause.text}"
    if cause.reason == "oom_killed":
        return f"{where} (pid {_pid(job, cause)}) was killed by the out-of-memory killer"
    if cause.reason == "rank_signalled" and end is not None and end.signal:
        return f"{where} (pid {_pid(job, cause)}) was killed by {signal_name(end.signal)}"
    if cause.reason == "rank_exited" and end is not None:
        return f"{where} exited with status {end.status}"
    if cause.text:
        return f"the node launcher of {cause.host} could not be started: {cause.text}"
    if end is not None and end.signal:
        return f"{_LAUNCHER} on {cause.host} was killed by {signal_name(end.signal)}"
    return f"{_LAUNCHER} on {cause.host} exited with status {end.status if end is not None else 'unknown'}"


def _pid(job: Job, cause: Failure) -> int | None:
    return job.ranks[cause.rank].pid if cause.rank is not None else None


def hint(cause: Failure) -> str | None:
    """Return what to do next, where the kind of failure tells it."""
    if cause.reason == "node_unreachable":
        return f"see what is wrong with it (ssh {cause.host}), or leave it out: --exclude {cause.host}"
    if cause.reason == "oom_killed":
        return f"more memory for the ranks on {cause.host}, a smaller batch, or fewer loader workers"
    if cause.exit is not None and cause.exit.signal:
        return _SIGNAL_HINTS.get(cause.exit.signal)  # type: ignore[call-overload, no-any-return]
    return None


def _others(job: Job, cause: Failure) -> list[dict[str, Any]]:
    """Group what became of the other ranks."""
    groups: dict[str, list[int]] = {}
    failed = {failure.rank for failure in job.failures}
    for rank in job.ranks.values():
        if rank.rank == cause.rank:
            continue
        if rank.exit is None and job.nodes[rank.host].phase == "gone":
            what = "out of contact"
        elif rank.exit is None and rank.pid is None:
            what = "not started"
        elif rank.rank in failed:
            what = "failed after it"
        elif rank.exit is not None and rank.exit.code == 0:
            what = "exited 0"
        else:
            what = "stopped with the job"
        groups.setdefault(what, []).append(rank.rank)
    return [{"what": what, "ranks": ranks} for what, ranks in groups.items()]
