"""Who holds a job up, and why: the ranks compared with each other. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safelaunch import stacks
from safelaunch.hostnames import fold_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safelaunch.hang import RankView

STOPPED, UNINTERRUPTIBLE = ("T", "t"), ("D",)
"""States of proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a job stands still. `ranks` are at fault, `location` is where the first of them stands.

    `votes` are the pieces of evidence that say so; `others` tells in groups what the innocent ranks do.
    """

    reason: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    location: str | None
    text: str
    votes: tuple[str, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...]


def judge(views: Mapping[int, RankView], members: Mapping[str, Sequence[int]], silence: float) -> Verdict:
    """Compare the ranks of a job in which nothing has moved for `silence` seconds."""
    active = [view for view in views.values() if not view.over]
    waiting = [view for view in active if view.waits]
    reason, culprits, votes = _find(views, members, active, waiting)
    place = location(culprits[0]) if culprits and not culprits[0].over else None
    ranks = tuple(view.rank for view in culprits)
    others = _others([view for view in active if view.rank not in ranks])
    hosts = tuple(dict.fromkeys(view.host for view in culprits))
    return Verdict(
        reason=reason,
        ranks=ranks,
        hosts=hosts,
        location=place,
        text=_sentence(reason, culprits, place, votes, others, silence),
        votes=tuple(votes),
        others=others,
    )


def at_failure(
    rank: int, views: Mapping[int, RankView], members: Mapping[str, Sequence[int]]
) -> Verdict | None:
    """Tell whether a rank failed only because it and others were in different collectives, or one had gone.

    For ranks that have all ended: gloo, unlike NCCL, lets such ranks fail at once where it notices.
    """
    failed = views[rank]
    if not failed.inside:
        return None
    wanted = members.get(_group(failed), ())
    gone = [view for view in views.values() if view.rank in wanted and view.status == 0]
    if gone:
        return _of_failure(
            "missed_collective", gone, ["exited 0 while the others still waited for it"], views
        )
    group, count = _call(failed)[:2]
    peers = [view for view in views.values() if view.inside and _call(view)[:2] == (group, count)]
    reason, odd, votes = _compare(peers, members)
    return None if reason != "collective_mismatch" else _of_failure(reason, odd, votes, views)


def _of_failure(
    reason: str, culprits: list[RankView], votes: list[str], views: Mapping[int, RankView]
) -> Verdict:
    ranks = tuple(view.rank for view in culprits)
    others = _others([view for view in views.values() if view.inside and view.rank not in ranks])
    return Verdict(
        reason=reason,
        ranks=ranks,
        hosts=tuple(dict.fromkeys(view.host for view in culprits)),
        location=None,
        text=_sentence(reason, culprits, None, votes, others, None),
        votes=tuple(votes),
        others=others,
    )


def _find(
    views: Mapping[int, RankView],
    members: Mapping[str, Sequence[int]],
    active: list[RankView],
    waiting: list[RankView],
) -> tuple[str, list[RankView], list[str]]:
    """Return the reason, who is at fault, and what says so: the surest signs first."""
    by_state = {
        reason: [view for view in active if view.row.get("state") in states]
        for reason, states in (("stopped", STOPPED), ("uninterruptible_io", UNINTERRUPTIBLE))
    }
    for reason, found in by_state.items():
        if found:
            wchan = found[0].row.get("wchan")
            words = {"stopped": "stopped by a signal (state T)"}.get(
                reason, f"in uninterruptible I/O ({wchan})"
            )
            return reason, found, [words]
    outside = [view for view in active if not view.waits]
    if outside and waiting:
        return _outside(outside, waiting)
    gone = _gone_early(views, members, waiting)
    if gone:
        return "missed_collective", gone, ["exited while the others still wait for it"]
    if not waiting:
        late, votes = _behind(outside)
        reason = "exit_hang" if all(view.phase == "finish" for view in outside) else _kind(late[0])
        return reason, late, votes or ["no rank waits in a collective"]
    return _compare(waiting, members)


def _gone_early(
    views: Mapping[int, RankView], members: Mapping[str, Sequence[int]], waiting: list[RankView]
) -> list[RankView]:
    wanted = {rank for view in waiting for rank in members.get(_group(view), views)}
    return [view for view in views.values() if view.over and view.rank in wanted]


def _outside(outside: list[RankView], waiting: list[RankView]) -> tuple[str, list[RankView], list[str]]:
    """Judge ranks that are somewhere else while others wait inside a collective."""
    group = _group(waiting[0])
    most = max(_count(view, group) for view in waiting)
    late = [view for view in outside if _count(view, group) < most] or outside
    votes = ["not inside a collective"]
    if group and any(_count(view, group) < most for view in late):
        votes.append(f"has begun {_count(late[0], group)} collectives of group {group}, the others {most}")
    if all(view.phase == "finish" for view in late):
        return "missed_collective", late, [*votes, "its main thread has ended"]
    return _kind(late[0]), late, votes


def _behind(active: list[RankView]) -> tuple[list[RankView], list[str]]:
    """Return who has begun fewer collectives than others, or all if none has.

    On GPUs nobody is seen to wait in a collective: it is begun, and the wait is for the device, elsewhere.
    """
    for group in dict.fromkeys(_group(view) for view in active):
        here = [view for view in active if group and group in (view.mark or {"groups": {}})["groups"]]
        most = max((_count(view, group) for view in here), default=0)
        late = [view for view in here if _count(view, group) < most]
        if late:
            count = _count(late[0], group)
            return late, [f"has begun {count} collectives of group {group}, others {most}"]
    return active, []


def _kind(view: RankView) -> str:
    if any(stacks.waits_for_lock(stacks.main_thread(text)) for text in view.stack_texts):
        return "jit_lock"
    if view.phase in ("start", "import", "init"):
        return "startup_stall"
    return "exit_hang" if view.phase == "finish" else "stuck_outside_collective"


def _compare(
    waiting: list[RankView], members: Mapping[str, Sequence[int]]
) -> tuple[str, list[RankView], list[str]]:
    """Judge ranks that all wait inside a collective: in different ones, or in the same."""
    joining = [view for view in waiting if view.phase == "init"]
    if joining:
        return "startup_stall", joining, ["all wait for each other to join the job"]
    calls = {view.rank: _call(view) for view in waiting}
    votes = [
        f"{_describe(call)}: ranks {fold_numbers(_of(calls, call))}" for call in dict.fromkeys(calls.values())
    ]
    for place in dict.fromkeys(call[:2] for call in calls.values()):
        here = [view for view in waiting if calls[view.rank][:2] == place]
        odd = _minority(here, calls)
        if odd:
            return "collective_mismatch", odd, votes
    usual = Counter(call[:2] for call in calls.values()).most_common(1)[0][0]
    elsewhere = [view for view in waiting if calls[view.rank][:2] != usual]
    missed = [view for view in elsewhere if view.rank in members.get(usual[0], calls)]
    if missed:
        # Without a majority nobody can say who is right.
        return "missed_collective", missed if len(missed) * 2 < len(waiting) else waiting, votes
    return "network_stall", [], [f"all ranks of its group are inside the same {_describe(_call(waiting[0]))}"]


def _minority(views: list[RankView], calls: Mapping[int, Call]) -> list[RankView]:
    """Return who is in another call than most: all of them without a majority, nobody if all are in one."""
    usual, number = Counter(calls[view.rank] for view in views).most_common(1)[0]
    if number == len(views):
        return []
    return [view for view in views if calls[view.rank] != usual] if number * 2 > len(views) else views


Call = tuple[str, int, str, tuple[int, ...], str]
"""Group, how many were begun there, operation, shape, data type."""


def _call(view: RankView) -> Call:
    name = _group(view)
    group = (view.mark or {"groups": {}})["groups"].get(name)
    if group is None:
        return "", 0, "", (), ""
    return name, group["count"], group["operation"], tuple(group["shape"]), group["type"]


def _describe(call: Call) -> str:
    name, count, operation, shape, kind = call
    sizes = "x".join(map(str, shape))
    tensor = f" of {sizes} {kind}" if sizes else ""
    return f"{operation}{tensor} (number {count} of group {name})" if operation else "no collective"


def _of(calls: Mapping[int, Call], call: Call) -> list[int]:
    return [rank for rank, other in calls.items() if other == call]


def _group(view: RankView) -> str:
    """Return the group in which a rank began its latest collective."""
    groups: Mapping[str, Any] = (view.mark or {"groups": {}})["groups"]
    return max(groups, key=lambda name: groups[name]["since"], default="")


def _count(view: RankView, group: str) -> int:
    return int((view.mark or {"groups": {}})["groups"].get(group, {"count": 0})["count"])


def location(view: RankView) -> str | None:
    """Return file:line where a rank stands: in a data loader's worker, if it waits for that."""
    if stacks.waits_for_loader(view.main_stack):
        for text in view.stack_texts[1:]:
            frame = stacks.users_frame(stacks.main_thread(text))
            if frame is not None and frame.is_users:
                return frame.place
    frame = stacks.users_frame(view.main_stack)
    return frame.place if frame is not None else None


def _others(innocent: list[RankView]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    groups: dict[str, list[int]] = {}
    for view in innocent:
        what = "wait to join the job" if view.phase == "init" else f"wait in {_call(view)[2]}"
        groups.setdefault(what if view.waits else f"stand in phase {view.phase or 'unknown'}", []).append(
            view.rank
        )
    return tuple((what, tuple(ranks)) for what, ranks in groups.items())


_WORDS = {
    "stopped": "is stopped",
    "uninterruptible_io": "waits for a disk or network file system that does not answer",
    "missed_collective": "did not come to a collective that the others wait in",
    "collective_mismatch": "is in another collective than the others",
    "stuck_outside_collective": "stands still",
    "jit_lock": "waits for a lock file that another process has left",
    "startup_stall": "does not get through its start",
    "exit_hang": "has done all work and did not end",
    "network_stall": "all ranks wait in the same collective, and it does not end: the network or a device",
}


_PLURAL = {"is": "are", "waits": "wait", "stands": "stand", "does": "do", "has": "have"}


def _sentence(
    reason: str,
    culprits: list[RankView],
    place: str | None,
    votes: Sequence[str],
    others: Sequence[tuple[str, tuple[int, ...]]],
    silence: float | None,
) -> str:
    words = _WORDS[reason]
    if culprits:
        ranks = fold_numbers([view.rank for view in culprits])
        hosts = ", ".join(dict.fromkeys(view.host for view in culprits))
        if len(culprits) > 1:
            verb, _, rest = words.partition(" ")
            words = f"{_PLURAL.get(verb, verb)} {rest}"
        words = f"rank{'s' * (len(culprits) > 1)} {ranks} on {hosts} {words}"
    if reason == "collective_mismatch":
        words += f" ({'; '.join(votes)})"
    if place:
        words += f" at {place}"
    if others and culprits:
        doing = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {fold_numbers(ranks)} {what}" for what, ranks in others
        )
        words += f" while {doing}"
    return words if silence is None else f"{words}; nothing has moved for {silence:.0f} s"
