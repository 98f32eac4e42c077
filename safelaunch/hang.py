"""Telling a job that hangs from one that is slow: a pure step from what the ranks show to what to do.

Silence is that no rank's mark moves: no phase, step or collective is begun or ended. Half an allowance of it
is a suspicion, and evidence is taken; after a whole one it is taken again. Times are the launcher's own, of a
clock that only goes forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safelaunch import stacks, verdicts
from safelaunch.job import Note, Tell

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from safelaunch.job import Action
    from safelaunch.verdicts import Verdict

STEADY_FACTOR, STEADY_LEAST, STEADY_MOST = 10, 120.0, 1800.0
"""The steady allowance: so many times the slowest healthy gap, within these seconds (DESIGN section 8)."""
ALLOWANCES = {
    "": 1800.0,
    "start": 600.0,
    "import": 600.0,
    "init": 600.0,
    "first_step": 1800.0,
    "checkpoint": 1800.0,
    "evaluate": 1800.0,
    "finish": 300.0,
}
"""Seconds of silence by phase, where no --hang-timeout is given; the first step compiles and fills caches.
The nameless phase is that of a rank without a hook."""
NOT_STARTED = 600.0
"""Seconds that a rank may take to be started; no --hang-timeout is meant for that."""
LONG_PHASES, LONG_FACTOR = ("checkpoint", "evaluate"), 10
"""Phases without steps of their own: so many times a given --hang-timeout."""
SUSPICION = 0.5
"""The part of the allowance after which the first evidence is taken."""
EVIDENCE_SECONDS = 4.0
"""How long the ranks' evidence may take to come in."""
BUSY_CORES = 0.1
"""Cores beyond which a rank works. What waits uses next to nothing."""
BUSY_BYTES = 262_144
"""Bytes read and written between two pieces of evidence beyond which a rank works; our dumps need less."""


@dataclass(slots=True)
class RankView:
    """What one rank shows.

    `row` is its latest progress, `moved` when its mark last changed, `printed` and `had_printed`
    whether it has printed anything since evidence was asked for last, and between then and the time before.
    """

    rank: int
    host: str
    moved: float
    row: Mapping[str, Any] = field(default_factory=dict)
    evidence: list[Mapping[str, Any]] = field(default_factory=list)
    printed: bool = False
    had_printed: bool = False
    over: bool = False
    status: int | None = None

    @property
    def mark(self) -> Mapping[str, Any] | None:
        """What its hook noted; None without a hook."""
        found: Mapping[str, Any] | None = self.row.get("mark")
        return found

    @property
    def phase(self) -> str:
        """Its phase, empty where unknown."""
        return str(self.mark["phase"]) if self.mark else ""

    @property
    def inside(self) -> bool:
        """Whether its latest collective has begun and nobody has waited for it to its end yet."""
        return self.mark is not None and bool(self.mark["inside"])

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: inside a collective, or joining the job.

        A rank that has begun an asynchronous one may be anywhere; its stack tells, once it was taken.
        """
        stack = self.main_stack
        return self.phase == "init" or (stacks.is_in_collective(stack) if stack else self.inside)

    @property
    def main_stack(self) -> stacks.Stack:
        """Its main thread's stack, by the latest evidence."""
        return stacks.main_thread(self.stack_texts[0]) if self.stack_texts else ()

    @property
    def stack_texts(self) -> list[str]:
        """The stacks of its processes, the rank's own first."""
        return [process["stacks"] for process in self.evidence[-1]["processes"]] if self.evidence else []

    def works(self) -> bool:
        """Tell whether it, or a child, did something between the last two pieces of evidence."""
        if self.printed or self.had_printed:
            return True
        if len(self.evidence) < 2:
            return False
        before, after = self.evidence[-2:]
        seconds = max(0.1, after["taken"] - before["taken"])
        old = {process["pid"]: process for process in before["processes"]}
        for process in after["processes"]:
            was = old.get(process["pid"])
            if was is None:
                return True
            if process["cpu"] - was["cpu"] > BUSY_CORES * seconds:
                return True
            if (process["io"] or 0) - (was["io"] or 0) > BUSY_BYTES:
                return True
            if process["stacks"] and was["stacks"] and _users(process) != _users(was):
                return True
        return False


def _users(process: Mapping[str, Any]) -> list[stacks.Frame]:
    return [frame for frame in stacks.main_thread(process["stacks"]) if frame.is_users]


class Hangs:
    """Watches one attempt of a job; `timeout` is a given --hang-timeout, or None to learn it."""

    def __init__(
        self, ranks: Mapping[int, str], *, timeout: float | None, busy_factor: float, now: float
    ) -> None:
        """Watch these ranks, {rank: host}."""
        self.views = {rank: RankView(rank, host, moved=now) for rank, host in ranks.items()}
        self.members: dict[str, list[int]] = {}
        self._timeout = timeout
        self._busy_factor = busy_factor
        self._stage = "calm"
        self._since = now
        self._slowest_gap = 0.0
        self._round = 0
        self._asked: set[int] = set()
        self._check_at = 0.0
        self._told_slow = False

    def progress(self, rows: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """Take what agents saw of some ranks."""
        for number, row in rows.items():
            view = self.views[int(number)]
            if not view.row or _moves(view.row, row):
                self._learn(view, now)
                view.moved = now
            view.row = row
            self.members.update(row.get("members") or {})

    def _learn(self, view: RankView, now: float) -> None:
        gap = now - max(other.moved for other in self.views.values())
        if view.phase == "steady":
            self._slowest_gap = max(self._slowest_gap, gap)

    def exited(self, rank: int, status: int | None, mark: Mapping[str, Any] | None, now: float) -> None:
        """Take the end of a rank, and what its mark said then."""
        view = self.views[rank]
        view.over, view.status, view.moved = True, status, now
        view.row = {**view.row, "mark": mark or view.mark}

    def printed(self, rank: int) -> None:
        """Take that a rank has printed something."""
        self.views[rank].printed = True

    def evidence(self, message: Mapping[str, Any]) -> None:
        """Take the evidence of one rank."""
        view = self.views[message["rank"]]
        view.evidence = [*view.evidence[-1:], message]
        if message["id"] == self._round:
            self._asked.discard(view.rank)

    def allowance(self) -> float:
        """Return the seconds of silence allowed now, by the phase of those who hold up the others."""
        active = self._active()
        holders = [view for view in active if not view.waits] or active
        return max((self._allowed(view) for view in holders), default=STEADY_MOST)

    def _allowed(self, view: RankView) -> float:
        if not view.row:
            return NOT_STARTED
        phase = view.phase
        if self._timeout is not None:
            return self._timeout * (LONG_FACTOR if phase in LONG_PHASES else 1)
        if phase == "steady":
            return max(STEADY_LEAST, min(STEADY_MOST, STEADY_FACTOR * self._slowest_gap))
        return ALLOWANCES[phase]

    def _active(self) -> list[RankView]:
        return [view for view in self.views.values() if not view.over]

    def tick(self, now: float) -> tuple[list[Action], Verdict | None]:
        """Let time pass; return what to ask and note, and a verdict once there is one."""
        active = self._active()
        if not active:
            return self._clear() if self._stage != "calm" else [], None
        moved = max(view.moved for view in self.views.values())
        if self._stage != "calm" and moved > self._since:
            return self._clear(), None
        silence, allowance = now - moved, self.allowance()
        if self._stage == "calm" and silence > SUSPICION * allowance:
            self._since = now
            return [
                Note("suspicion", "info", fields={"silence": silence}),
                *self._ask("suspicion", now),
            ], None
        if self._stage == "suspicion" and silence > allowance:
            return self._ask("judging", now), None
        if self._stage == "slow" and now > self._check_at:
            return self._ask("judging", now), None
        if self._stage == "judging" and (not self._asked or now > self._check_at):
            return self._decide(silence, allowance, now)
        return [], None

    def _ask(self, stage: str, now: float) -> list[Action]:
        self._stage, self._check_at = stage, now + EVIDENCE_SECONDS
        self._round += 1
        self._asked = {view.rank for view in self._active()}
        by_host: dict[str, list[int]] = {}
        for view in self._active():
            view.had_printed, view.printed = view.printed, False
            by_host.setdefault(view.host, []).append(view.rank)
        return [
            Tell(host, {"do": "evidence", "id": self._round, "ranks": ranks})
            for host, ranks in by_host.items()
        ]

    def _clear(self) -> list[Action]:
        stage, self._stage = self._stage, "calm"
        for view in self.views.values():
            view.evidence = []
        told, self._told_slow = self._told_slow or stage == "hung", False
        return [Note("hang_cleared", fields={"stage": stage})] if told else []

    def _decide(self, silence: float, allowance: float, now: float) -> tuple[list[Action], Verdict | None]:
        active = self._active()
        working = [view for view in active if not view.waits and view.works()]
        # Who works and holds nobody up is not slow: it may generate text for hours without a collective.
        held_up = any(view.waits for view in active)
        if working and not held_up:
            self._stage, self._check_at = "slow", now + allowance * SUSPICION
            return [], None
        if working and silence < self._busy_factor * allowance:
            first, self._told_slow = not self._told_slow, True
            self._stage, self._check_at = "slow", now + allowance * SUSPICION
            verdict = verdicts.judge(self.views, self.members, silence)
            note = Note("slow", "warning", fields={"text": verdict.text, "ranks": list(verdict.ranks)})
            return [note] if first else [], None
        self._stage = "hung"
        return [], verdicts.judge(self.views, self.members, silence)


def _moves(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Tell whether a rank did anything that counts: by its mark, or by CPU and I/O where it has none."""
    old, new = before.get("mark"), after.get("mark")
    if new is not None:
        return old is None or _signature(old) != _signature(new)
    return bool(
        after["cpu"] - before.get("cpu", 0.0) > BUSY_CORES
        or (after["io"] or 0) - (before.get("io") or 0) > BUSY_BYTES
    )


def _signature(mark: Mapping[str, Any]) -> Iterable[Any]:
    counts = {name: group["count"] for name, group in mark["groups"].items()}
    return mark["phase"], mark["steps"], mark["inside"], counts
