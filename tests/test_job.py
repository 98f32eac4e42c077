"""Histories of events fed to the pure job, and what it asks for."""

from __future__ import annotations

import pytest

from safelaunch import diagnose, running
from safelaunch.job import CLOCK_DOUBT, STOP_MARGIN, SWEEP_MARGIN, Job, Note, Reconnect, Sweep, Tell
from safelaunch.plan import Node
from safelaunch.verdicts import Verdict


def make_job(offsets=None, grace=5.0, reconnect_grace=60.0):
    nodes = [
        Node(name="a", slots=(0, 1), node_rank=0, first_rank=0),
        Node(name="b", slots=(0, 1), node_rank=1, first_rank=2),
    ]
    job = Job(nodes, grace=grace, reconnect_grace=reconnect_grace, clock_offsets=offsets or {}, now=0.0)
    for host in ("a", "b"):
        job.agent(host, {"event": "agent_started", "pid": 1, "time": 0}, 0)
        job.agent(host, {"event": "launcher_started", "pid": 2, "time": 0}, 0)
    for rank, host in enumerate("aabb"):
        job.agent(
            host, {"event": "rank_started", "rank": rank, "local_rank": 0, "pid": 10 + rank, "time": 1}, 1
        )
    return job


def exited(rank, status=None, signal=None, time=2.0, **more):
    return {
        "event": "rank_exited",
        "rank": rank,
        "pid": 10 + rank,
        "status": status,
        "signal": signal,
        "time": time,
        **more,
    }


def launcher_exited(status=0, signal=None, time=3.0):
    return {"event": "launcher_exited", "pid": 2, "status": status, "signal": signal, "time": time}


def stops(actions):
    return {a.host: a.command["grace"] for a in actions if isinstance(a, Tell) and a.command["do"] == "stop"}


def finish(job, hosts="ab", survivors=()):
    for host in hosts:
        job.agent(host, {"event": "finished", "survivors": list(survivors), "time": 9}, 9)


def verdict(job, logs=None, node_logs=None):
    return diagnose.outcome(job, logs or {}, node_logs or {})


def test_success_needs_every_exit_seen():
    job = make_job()
    for rank, host in enumerate("aabb"):
        assert stops(job.agent(host, exited(rank, 0), 2)) == {}
    for host in "ab":
        job.agent(host, launcher_exited(), 3)
    actions = job.agent("a", {"event": "finished", "survivors": [], "time": 4}, 4)

    assert Tell("a", {"do": "bye"}) in actions
    assert not job.over
    finish(job, "b")
    assert job.over
    assert verdict(job)["status"] == "success"
    assert verdict(job)["exit_status"] == 0


def test_an_exit_that_was_not_seen_is_no_success():
    job = make_job()
    for rank, host in enumerate("aab"):
        job.agent(host, exited(rank, 0), 2)
    for host in "ab":
        job.agent(host, launcher_exited(), 3)
    finish(job)

    assert verdict(job)["status"] == "failed"
    assert verdict(job)["exit_status"] == 70
    assert verdict(job)["culprit"]["ranks"] == [3]


def test_a_failing_rank_stops_all_nodes_at_once():
    job = make_job()

    actions = job.agent("b", exited(3, 3), 2.1)

    assert stops(actions) == {"a": 5.0, "b": 5.0}
    finish(job)
    result = verdict(
        job, {3: 'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\nOSError: no\n'}
    )
    assert result["exit_status"] == 3
    assert result["culprit"] == {
        "ranks": [3],
        "hosts": ["b"],
        "reason": "rank_exited",
        "location": "t.py:4",
        "since": 2.0,
    }
    assert result["summary"] == "rank 3 on b exited with status 3 at t.py:4: OSError: no"


def test_first_by_corrected_time_is_the_root_cause():
    job = make_job(offsets={"b": 100.0})
    job.agent("a", exited(0, 1, time=2.5), 2.6)
    job.agent("b", exited(2, 7, time=102.0), 2.7)
    finish(job)

    assert verdict(job)["culprit"]["ranks"] == [2]
    assert verdict(job)["exit_status"] == 7


def test_who_raised_first_is_the_root_cause_though_it_ended_later():
    job = make_job()
    raised = {"error": {"time": 2.2, "error": "", "traceback": ""}}
    job.agent("a", exited(0, 1, time=2.5), 2.6)
    job.agent("b", exited(2, 7, time=2.8, **raised), 2.9)
    finish(job)

    assert verdict(job)["culprit"]["ranks"] == [2]


def test_what_dies_of_our_stop_is_no_failure():
    job = make_job()
    job.agent("a", exited(0, 1, time=2.0), 2.1)
    job.agent("b", exited(2, None, 15, time=2.4), 2.5)
    job.agent("b", launcher_exited(1, time=2.5), 2.6)
    finish(job)

    assert [f.rank for f in job.failures] == [0]
    assert {"what": "stopped with the job", "ranks": [1, 2, 3]} in verdict(job)["others"]


def test_a_signal_goes_before_an_exit_that_the_clocks_cannot_order():
    job = make_job()
    job.agent("a", exited(0, 1, time=2.0), 2.0)
    job.agent("b", exited(3, None, 9, time=2.0 + CLOCK_DOUBT / 2), 2.0)
    finish(job)
    # stop was ordered at 2.0, so a death after it counts only if it was before: use the same instant
    job2 = make_job()
    job2.agent("a", exited(0, 1, time=2.0), 2.1)
    job2.agent("b", exited(3, None, 9, time=2.03), 2.2)
    finish(job2)

    assert verdict(job)["exit_status"] == 1
    assert verdict(job2)["exit_status"] == 137
    assert verdict(job2)["culprit"]["reason"] == "rank_signalled"


def test_oom_is_told_from_a_plain_kill():
    job = make_job()
    job.agent("b", exited(3, None, 9, oom=True), 2)
    finish(job)

    assert verdict(job)["culprit"]["reason"] == "oom_killed"


def test_a_killed_node_launcher_is_named():
    job = make_job()

    actions = job.agent("b", launcher_exited(None, 9, time=2), 2)

    assert set(stops(actions)) == {"a", "b"}
    finish(job)
    assert verdict(job)["culprit"]["reason"] == "launcher_died"
    assert verdict(job)["culprit"]["hosts"] == ["b"]
    assert verdict(job)["exit_status"] == 137


def test_a_launcher_that_passes_its_ranks_status_on_did_not_die_first():
    job = make_job()
    job.agent("b", exited(3, 4, time=2), 1.5)
    job.agent("b", launcher_exited(4, time=2.1), 3)
    finish(job)

    assert [f.reason for f in job.failures] == ["rank_exited"]


def test_start_failed_says_why():
    job = make_job()
    job.agent("b", {"event": "start_failed", "error": "no such directory: /x", "time": 2}, 2)
    finish(job)

    assert verdict(job)["exit_status"] == 127
    assert "no such directory: /x" in verdict(job)["summary"]


def test_a_lost_connection_that_comes_back_changes_nothing():
    job = make_job()

    assert Reconnect("b") in job.lost("b", "closed", 10)
    assert job.tick(50) == []
    job.back("b", 60)
    assert job.tick(500) == []
    assert not job.failures


def test_a_node_that_stays_away_ends_the_job():
    job = make_job()
    job.lost("b", "closed", 10)

    assert stops(job.tick(71)) == {"a": 5.0}
    finish(job, "a")
    assert job.over
    assert verdict(job)["exit_status"] == 74
    assert verdict(job)["status"] == "node_lost"
    assert verdict(job)["culprit"]["reason"] == "node_unreachable"


def test_connections_that_break_before_the_agent_speaks_do_not_prolong_the_grace():
    job = make_job(reconnect_grace=60)
    job.lost("b", "closed", 10)

    for now in range(11, 70):
        assert job.lost("b", "python3: no space left on device", now) == [Reconnect("b")]
        assert job.tick(now) == []
    assert stops(job.tick(71)) == {"a": 5.0}
    finish(job, "a")
    assert "no space left on device" in verdict(job)["summary"]
    assert {"what": "out of contact", "ranks": [2, 3]} in verdict(job)["others"]
    assert job.unconfirmed == ("b",)


def test_an_agent_that_could_not_start_is_named_and_swept():
    job = make_job()
    actions = job.agent("b", {"event": "agent_failed", "error": "Traceback ...\nOSError: no space"}, 5)

    assert Sweep("b") in actions
    finish(job, "a")
    job.swept("b", [], 6)
    assert job.over
    assert verdict(job)["culprit"]["reason"] == "launcher_died"
    assert (
        "b could not be started: safelaunch's agent could not start there: OSError: no space"
        in (verdict(job)["summary"])
    )


def test_the_second_signal_gives_up_lost_nodes_and_the_third_all():
    job = make_job()
    job.lost("b", "closed", 1)
    job.interrupt(15, 2)
    job.interrupt(15, 3)
    assert [node.host for node in job.nodes.values() if node.over] == ["b"]
    job.interrupt(15, 4)

    assert job.over
    assert verdict(job)["exit_status"] == 143
    assert "nobody could look whether all processes on a, b ended" in verdict(job)["summary"]


def test_a_sweep_that_never_ends_is_given_up():
    job = make_job(grace=5)
    job.agent("b", {"event": "agent_lost"}, 10)
    finish(job, "a")

    assert job.tick(10 + 5 + SWEEP_MARGIN - 1) == []
    job.tick(10 + 5 + SWEEP_MARGIN + 1)
    assert job.over
    assert job.unconfirmed == ("b",)


def test_a_lost_node_hears_of_the_stop_when_it_is_back():
    job = make_job()
    job.lost("b", "closed", 1)
    assert set(stops(job.agent("a", exited(0, 1, time=2), 2))) == {"a", "b"}

    assert set(stops(job.back("b", 3))) == {"b"}


@pytest.mark.parametrize("event", ["agent_lost", "no_agent"])
def test_a_dead_agent_is_swept_and_ends_the_job(event):
    job = make_job()

    actions = job.agent("b", {"event": event}, 5)

    assert Sweep("b") in actions
    assert "a" in stops(actions)
    finish(job, "a")
    assert not job.over
    job.swept("b", [77], 6)
    assert job.over
    assert job.survivors == {"b": (77,)}
    assert verdict(job)["exit_status"] == 74


def test_an_agent_that_does_not_stop_is_swept():
    job = make_job(grace=5)
    job.agent("a", exited(0, 1, time=2), 2)
    finish(job, "a")

    assert job.tick(2 + 5 + STOP_MARGIN - 1) == []
    assert Sweep("b") in job.tick(2 + 5 + STOP_MARGIN + 1)
    assert job.tick(2 + 5 + STOP_MARGIN + 2) == []


@pytest.mark.parametrize(("signum", "status"), [(2, 130), (15, 143), (1, 129)])
def test_interrupt(signum, status):
    job = make_job()

    assert stops(job.interrupt(signum, 2)) == {"a": 5.0, "b": 5.0}
    assert stops(job.interrupt(signum, 3)) == {"a": 0.0, "b": 0.0}
    finish(job)
    assert verdict(job)["status"] == "interrupted"
    assert verdict(job)["exit_status"] == status


def test_a_failure_before_the_interrupt_is_still_the_cause():
    job = make_job()
    job.agent("a", exited(0, 9, time=1.5), 2)
    job.interrupt(2, 2.1)
    finish(job)

    assert verdict(job)["exit_status"] == 9


@pytest.mark.parametrize(
    ("reason", "status", "exit_status"),
    [
        ("stuck_outside_collective", "hang", 75),
        ("network_stall", "hang", 75),
        ("collective_mismatch", "desync", 76),
        ("missed_collective", "desync", 76),
    ],
)
def test_a_hang_ends_the_job_with_its_verdict(reason, status, exit_status):
    job = make_job()
    culprits = () if reason == "network_stall" else (2,)
    found = Verdict(
        reason=reason,
        ranks=culprits,
        hosts=("b",) * len(culprits),
        location="t.py:4",
        text="rank 2 on b stands still",
        votes=("a reason",),
        others=(("wait in allreduce", (0, 1, 3)),),
    )
    assert stops(job.hang(found, 5, kill=False)) == {}
    assert not job.failures
    assert set(stops(job.hang(found, 6, kill=True))) == {"a", "b"}
    finish(job)
    result = verdict(job)

    assert (result["status"], result["exit_status"], result["summary"]) == (status, exit_status, found.text)
    assert (result["culprit"]["ranks"], result["culprit"]["location"]) == (list(culprits), "t.py:4")
    assert result["others"] == [{"what": "wait in allreduce", "ranks": [0, 1, 3]}]
    assert result["reasons"] == ["a reason"]
    assert result["first_failure"] is None


@pytest.mark.parametrize(("signum", "may"), [(None, True), (6, True), (9, False), (15, False), (11, False)])
def test_only_an_exception_or_an_abort_can_follow_from_other_ranks(signum, may):
    job = make_job()
    job.agent("b", exited(3, None if signum else 1, signum), 2.1)

    assert running._may_follow(job.root_cause()) is may


def test_every_note_can_be_recorded():
    job = make_job()
    notes = [a for a in job.agent("b", exited(3, 3), 2) if isinstance(a, Note)]

    assert [n.event for n in notes] == ["rank_exited", "stopping"]
    assert notes[0].rank == 3
    assert notes[0].level == "error"


TRACE = """noise
Traceback (most recent call last):
  File "/home/u/train.py", line 10, in <module>
    main()
  File "/home/u/model.py", line 20, in forward
    return torch.add(x)
  File "/venv/lib/python3.11/site-packages/torch/x.py", line 5, in add
    raise RuntimeError
RuntimeError: shapes differ
after
"""


def test_traceback_names_the_users_line():
    found = diagnose.last_traceback(TRACE)

    assert found is not None
    assert found.location == "/home/u/model.py:20"
    assert found.error == "RuntimeError: shapes differ"
    assert found.text.startswith("Traceback")
    assert found.text.endswith("shapes differ")


def test_traceback_with_the_prefix_of_torch():
    prefixed = "".join(f"[rank3]: {line}\n" for line in TRACE.splitlines()[1:-1])
    found = diagnose.last_traceback(prefixed)

    assert found is not None
    assert found.location == "/home/u/model.py:20"


def test_the_last_of_two_tracebacks_counts_and_a_cut_one_is_no_error():
    assert diagnose.last_traceback("nothing") is None
    assert diagnose.last_traceback("Traceback (most recent call last):").error == ""
    double = (
        TRACE
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACE.replace("shapes differ", "second")
    )
    assert diagnose.last_traceback(double).error == "RuntimeError: second"
