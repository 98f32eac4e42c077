"""Timeouts and debug settings that we set where the user has not, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safelaunch.plan import Variable

if TYPE_CHECKING:
    from collections.abc import Collection

    from safelaunch.plan import Limits

_RECORDER_DEFAULT_ON = (2, 6)
"""First torch whose flight recorder and dump on timeout are on (its pull requests 142260, 143446)."""


def debug_settings(taken: Collection[str], torch_version: str | None, verbosity: int) -> list[Variable]:
    """Return debug variables for the ranks, leaving out every name in `taken` (set by the user).

    What costs nothing in steady state is always on; NCCL's own log comes with `--verbose`, torch's
    checks of every collective with a second one.
    """
    wanted = {"PYTHONFAULTHANDLER": ("1", "Python stacks when a rank dies of a signal")}
    if _release(torch_version) < _RECORDER_DEFAULT_ON:
        wanted["TORCH_NCCL_TRACE_BUFFER_SIZE"] = ("2000", "flight recorder, off by default in this torch")
        wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = (
            "1",
            "keep the recorder's content when a collective times out",
        )
    if verbosity >= 1:
        wanted["NCCL_DEBUG"] = ("INFO", "--verbose")
    if verbosity >= 2:
        wanted["TORCH_DISTRIBUTED_DEBUG"] = ("DETAIL", "--verbose twice")
    return [
        Variable(name=name, value=value, origin=f"safelaunch: {reason}")
        for name, (value, reason) in wanted.items()
        if name not in taken
    ]


def _release(version: str | None) -> tuple[int, ...]:
    """Return major and minor; an unknown version counts as current."""
    parts = (version or "").split(".")[:2]
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else _RECORDER_DEFAULT_ON


def ladder(limits: Limits, timeout_minutes: str | None) -> list[dict[str, object]]:
    """Return the timeouts of a run in seconds with their reasons, as they stand in plan.json."""
    given = timeout_minutes is not None and timeout_minutes.isdigit()
    minutes = int(timeout_minutes or 0) if given else 10
    origin = "DEEPSPEED_TIMEOUT" if given else "DeepSpeed's default"
    rows = [
        ("ssh", limits.ssh_timeout, "a node that has not answered by then is unreachable"),
        ("grace", limits.grace, "from SIGTERM to SIGKILL when the job is stopped"),
        ("reconnect_grace", limits.reconnect_grace, "a node cut off longer ends its ranks by itself"),
        ("process_group", minutes * 60.0, f"{origin}: a collective that waits longer raises in the ranks"),
    ]
    return [{"name": name, "seconds": seconds, "reason": reason} for name, seconds, reason in rows]
