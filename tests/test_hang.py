"""Histories of progress fed to the pure hang detection: what it asks, notes and concludes."""

from __future__ import annotations

import pytest

from safelaunch import verdicts
from safelaunch.hang import EVIDENCE_SECONDS, STEADY_LEAST, Hangs
from safelaunch.job import Note, Tell

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
STACK = 'Current thread 0x01 (most recent call first):\n{}  File "/home/ada/{}", line {} in f\n'
WRAPPER = '  File "/tmp/safelaunch-1/run.0/sitecustomize.py", line 9 in wait\n'


def group(count=5, operation="allreduce", shape=(4,), since=0.0, kind="float32"):
    return {"count": count, "operation": operation, "type": kind, "shape": list(shape), "since": since}


def row(phase="steady", steps=5, *, inside=True, groups=None, state="S", cpu=1.0, io=0, mark=True):
    found = {
        "phase": phase,
        "steps": steps,
        "inside": inside,
        "groups": {"0": group()} if groups is None else groups,
    }
    return {
        "state": state,
        "cpu": cpu,
        "io": io,
        "wchan": "futex_wait",
        "mark": found if mark else None,
        "members": {"0": [0, 1, 2, 3]},
    }


class Story:
    """A watched job; `rows` is what each rank shows, `lines` where it stands, `cpu` what it uses a second."""

    def __init__(self, rows, timeout=10.0, lines=None):
        self.now = 100.0
        self.hangs = Hangs(HOSTS, timeout=timeout, busy_factor=6.0, now=self.now)
        self.rows = rows
        self.lines = lines or {}
        self.cpu = {}
        self.elsewhere = set()  # ranks that have begun a collective, and do something else
        self.notes = []
        self.verdict = None
        self.hangs.progress(rows, self.now)

    def run(self, seconds):
        """Let time pass, second by second, until a verdict; agents answer at once."""
        end = self.now + seconds
        while self.now < end and self.verdict is None:
            self.now += 1.0
            self._look()
        return self.verdict

    def _look(self):
        actions, self.verdict = self.hangs.tick(self.now)
        for action in actions:
            if isinstance(action, Note):
                self.notes.append(action.event)
            elif isinstance(action, Tell):
                assert action.command["do"] == "evidence"
                for rank in action.command["ranks"]:
                    assert HOSTS[rank] == action.host
                    self.hangs.evidence(self.evidence(rank, action.command["id"]))

    def evidence(self, rank, number):
        cpu = self.cpu.get(rank, 0.0) * self.now
        line = self.lines.get(rank, ("train.py", 10))
        process = {"pid": 10 + rank, "state": "S", "cpu": cpu, "io": 0, "wchan": None, "command": "python"}
        mark = self.rows[rank]["mark"] if rank in self.rows else None
        waits = mark is not None and mark["inside"] and rank not in self.elsewhere
        process["stacks"] = STACK.format(WRAPPER if waits else "", *line)
        return {"id": number, "rank": rank, "taken": self.now, "mark": None, "processes": [process]}

    def change(self, **rows):
        self.rows = {**self.rows, **{int(name[1:]): value for name, value in rows.items()}}
        self.hangs.progress(self.rows, self.now)


def all_waiting(**changes):
    return {rank: row(**changes) for rank in HOSTS}


def outside(**changes):
    return row(inside=False, groups={"0": group(count=4)}, **changes)


def test_the_rank_that_the_others_wait_for_is_named_with_its_line():
    story = Story({**all_waiting(), 2: outside()}, lines={2: ("data.py", 77)})
    verdict = story.run(30)

    assert story.now <= 100 + 10 + EVIDENCE_SECONDS
    assert verdict.reason == "stuck_outside_collective"
    assert (verdict.ranks, verdict.hosts) == ((2,), ("b",))
    assert verdict.location == "/home/ada/data.py:77"
    assert verdict.others == (("wait in allreduce", (0, 1, 3)),)
    assert "has begun 4 collectives of group 0, the others 5" in verdict.votes
    assert story.notes == ["suspicion"]
    assert verdict.text.startswith(
        "rank 2 on b stands still at /home/ada/data.py:77 while ranks 0-1,3 wait in"
    )


def test_progress_in_time_is_no_hang():
    story = Story({**all_waiting(), 2: outside()})
    for step in range(6, 20):
        assert story.run(9) is None
        story.change(r2=row(steps=step), r0=row(steps=step))
    assert "hang_cleared" not in story.notes
    assert "slow" not in story.notes


def test_a_rank_that_works_is_slow_until_the_busy_ceiling():
    story = Story({**all_waiting(), 2: outside()})
    story.cpu = {2: 0.9}

    assert story.run(45) is None
    assert story.notes == ["suspicion", "slow"]
    verdict = story.run(40)
    assert verdict.ranks == (2,)
    assert 160 <= story.now <= 170


def test_waiting_ranks_that_spin_are_not_at_work():
    story = Story({**all_waiting(), 2: outside()})
    story.cpu = {0: 1.0, 1: 1.0, 3: 1.0}

    assert story.run(20).ranks == (2,)


def test_slowness_that_passes_is_noted():
    story = Story({**all_waiting(), 2: outside()})
    story.cpu = {2: 0.9}
    story.run(20)
    story.change(r2=row(steps=6))

    assert story.run(4) is None
    assert story.notes == ["suspicion", "slow", "hang_cleared"]


def test_a_hang_that_ends_with_the_run_is_noted():
    story = Story({**all_waiting(), 2: outside(state="T")})
    assert story.run(20).reason == "stopped"
    for rank in HOSTS:
        story.hangs.exited(rank, 0, None, story.now)
    story.verdict = None

    assert story.run(2) is None
    assert story.notes == ["suspicion", "hang_cleared"]


def test_a_stopped_rank_and_one_in_io():
    assert Story({**all_waiting(), 1: outside(state="T")}).run(20).reason == "stopped"
    assert Story({**all_waiting(), 1: row(state="T")}).run(20).ranks == (1,)
    verdict = Story({**all_waiting(), 1: outside(state="D")}).run(20)
    assert (verdict.reason, verdict.ranks) == ("uninterruptible_io", (1,))
    assert "futex_wait" in verdict.votes[0]


def test_a_rank_that_ended_early():
    story = Story(all_waiting())
    story.hangs.exited(3, 0, None, story.now)
    verdict = story.run(20)

    assert (verdict.reason, verdict.ranks, verdict.location) == ("missed_collective", (3,), None)
    assert verdict.others == (("wait in allreduce", (0, 1, 2)),)


def test_a_rank_that_has_finished_while_the_others_wait():
    story = Story({**all_waiting(), 1: outside(phase="finish")})
    assert story.run(20).reason == "missed_collective"


@pytest.mark.parametrize(
    ("other", "reason", "words"),
    [
        (group(operation="broadcast"), "collective_mismatch", "broadcast of 4 float32"),
        (group(shape=(8,)), "collective_mismatch", "allreduce of 8 float32"),
        (group(kind="int64"), "collective_mismatch", "int64"),
        (group(count=4), "missed_collective", "number 4 of group 0"),
    ],
)
def test_ranks_in_different_collectives(other, reason, words):
    verdict = Story({**all_waiting(), 2: row(groups={"0": other})}).run(20)

    assert (verdict.reason, verdict.ranks) == (reason, (2,))
    assert any(words in vote for vote in verdict.votes)


def test_without_a_majority_all_are_named():
    rows = {
        rank: row(groups={"0": group(operation="broadcast" if rank % 2 else "allreduce")}) for rank in HOSTS
    }
    assert Story(rows).run(20).ranks == (0, 1, 2, 3)


def test_a_mismatch_in_another_group():
    deeper = {"0": group(since=1.0), "7": group(count=2, since=2.0)}
    rows = {**all_waiting(groups={"0": group(since=1.0), "7": group(count=2, since=2.0)})}
    rows[3] = row(groups={**deeper, "7": group(count=2, operation="broadcast", since=2.0)})

    assert Story(rows).run(20).ranks == (3,)


def test_all_in_the_same_collective_is_the_network():
    verdict = Story(all_waiting()).run(20)
    assert (verdict.reason, verdict.ranks) == ("network_stall", ())


def test_who_does_not_come_to_the_start():
    rows = {
        **{rank: row("init", 0, inside=False, groups={}) for rank in HOSTS},
        2: row("start", 0, inside=False, groups={}),
    }
    verdict = Story(rows).run(20)
    assert (verdict.reason, verdict.ranks) == ("startup_stall", (2,))
    assert verdict.others == (("wait to join the job", (0, 1, 3)),)


def test_all_done_and_not_gone():
    verdict = Story({rank: row("finish", inside=False) for rank in HOSTS}).run(20)
    assert verdict.reason == "exit_hang"


def test_checkpoints_and_evaluation_may_take_longer():
    for phase in ("checkpoint", "evaluate"):
        assert Story({**all_waiting(), 0: outside(phase=phase)}).run(95) is None
        assert Story({**all_waiting(), 0: outside(phase=phase)}).run(120) is not None


def test_the_steady_allowance_is_learnt():
    story = Story(all_waiting(), timeout=None)
    assert story.hangs.allowance() == STEADY_LEAST
    for step in range(6, 9):
        story.now += 30
        story.change(**{f"r{rank}": row(steps=step) for rank in HOSTS})
    assert story.hangs.allowance() == 300
    story.now += 500
    story.change(r0=row(steps=20))
    assert story.hangs.allowance() == 1800


def test_who_works_and_holds_nobody_up_is_never_a_hang():
    story = Story({rank: row("first_step", 0, inside=False, groups={}) for rank in HOSTS})
    story.cpu = {0: 0.9}
    assert story.run(300) is None
    assert "slow" not in story.notes
    story.cpu = {}
    assert story.run(30) is not None


def test_evidence_of_a_hang_that_has_passed_is_forgotten():
    story = Story({**all_waiting(), 2: outside()})
    story.cpu = {2: 0.9}
    story.run(20)
    story.change(r2=row(steps=6))
    story.run(1)

    assert all(view.evidence == [] for view in story.hangs.views.values())


def test_where_a_rank_stands_is_told_by_what_it_waits_for():
    def with_frame(file, *children):
        def evidence(rank, number):
            found = Story.evidence(story, rank, number)
            first = found["processes"][0]
            if rank == 2:
                first["stacks"] = first["stacks"].replace(
                    ":\n", f':\n  File "/v/site-packages/{file}", line 1 in g\n', 1
                )
                more = [{**first, "pid": 99, "stacks": STACK.format("", *child)} for child in children]
                found["processes"] += more
            return found

        return evidence

    story = Story({**all_waiting(), 2: outside()})
    story.evidence = with_frame("torch/utils/file_baton.py")
    assert story.run(20).reason == "jit_lock"
    story = Story({**all_waiting(), 2: outside()})
    story.evidence = with_frame("torch/utils/data/dataloader.py", ("shards.py", 8))
    assert story.run(20).location == "/home/ada/shards.py:8"
    story = Story({**all_waiting(), 2: outside()})
    story.evidence = with_frame("torch/utils/data/dataloader.py")
    assert story.run(20).location == "/home/ada/train.py:10"


def test_sentences_are_told_in_number():
    assert "rank 2 on b stands still" in Story({**all_waiting(), 2: outside()}).run(20).text
    rows = {**all_waiting(), 2: outside(), 3: outside()}
    assert "ranks 2-3 on b stand still" in Story(rows).run(20).text


def test_who_prints_works():
    story = Story({**all_waiting(), 2: outside()})
    for _ in range(5):
        story.hangs.printed(2)
        assert story.run(4) is None
        story.hangs.printed(2)
    assert story.run(60).ranks == (2,)


def test_a_rank_in_an_asynchronous_collective_is_where_its_stack_says():
    story = Story(all_waiting(), lines={3: ("load.py", 5)})
    story.elsewhere = {3}
    verdict = story.run(20)

    assert (verdict.ranks, verdict.location) == ((3,), "/home/ada/load.py:5")
    assert verdict.others == (("wait in allreduce", (0, 1, 2)),)


def test_counts_tell_who_is_late_where_nobody_is_seen_to_wait():
    late = row(inside=False, groups={"0": group(count=4)})
    verdict = Story({**all_waiting(inside=False), 1: late}).run(20)

    assert (verdict.reason, verdict.ranks) == ("stuck_outside_collective", (1,))
    assert verdict.votes == ("has begun 4 collectives of group 0, others 5",)


def test_a_short_timeout_is_not_meant_for_ranks_that_have_not_started():
    story = Story({})
    assert story.run(590) is None
    assert story.run(30) is not None
    late = Story({})
    assert late.run(100) is None
    late.change(**{f"r{rank}": row(inside=False, phase="start", groups={}) for rank in HOSTS})
    assert late.run(9) is None
    assert late.run(9) is not None


def test_ranks_without_a_hook_are_judged_by_what_they_use():
    rows = {rank: row(mark=False) for rank in HOSTS}
    busy = Story(rows)
    for second in range(1, 40):
        assert busy.run(1) is None
        busy.change(r0=row(mark=False, cpu=1.0 + second))
    assert Story(rows).run(20) is not None


@pytest.mark.parametrize(
    ("rows", "culprits", "reason"),
    [
        ({2: row(groups={"0": group(shape=(8,))})}, (2,), "collective_mismatch"),
        ({2: row(groups={"0": group(operation="broadcast")})}, (2,), "collective_mismatch"),
        ({2: row(groups={"0": group(count=6)})}, None, None),  # others may be behind a broadcast's root
        ({}, None, None),
        ({2: outside()}, None, None),
    ],
)
def test_what_lies_behind_a_rank_that_failed_in_a_collective(rows, culprits, reason):
    story = Story({**all_waiting(), **rows})
    story.hangs.exited(0, None, row()["mark"], story.now)
    verdict = verdicts.at_failure(0, story.hangs.views, story.hangs.members)

    assert (verdict.ranks, verdict.reason) == (culprits, reason) if culprits else verdict is None


def test_a_rank_that_left_lies_behind_the_failure_of_those_who_waited():
    story = Story(all_waiting())
    story.hangs.exited(2, 0, None, story.now)
    story.hangs.exited(0, 1, row()["mark"], story.now)
    verdict = verdicts.at_failure(0, story.hangs.views, story.hangs.members)

    assert (verdict.reason, verdict.ranks) == ("missed_collective", (2,))
    assert "rank 2 on b did not come to a collective" in verdict.text
    story.hangs.exited(1, 1, {**row()["mark"], "inside": False}, story.now)
    assert verdicts.at_failure(1, story.hangs.views, story.hangs.members) is None


def test_a_verdict_comes_without_evidence_too():
    story = Story({**all_waiting(), 2: outside()})
    story.evidence = lambda rank, number: {**Story.evidence(story, rank, number), "id": -1}
    verdict = story.run(30)

    assert verdict.ranks == (2,)
    assert story.now <= 100 + 10 + EVIDENCE_SECONDS + 2
