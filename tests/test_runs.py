"""Run directories: found by name, locked while alive, pruned when old."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from safelaunch import runs


def test_create_locks_and_points_latest(tmp_path):
    run, lock = runs.create(str(tmp_path / "r"), "dir/train it.py")

    assert runs.RUN_ID.fullmatch(os.path.basename(run.path))
    assert "-train_it-" in run.path
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o700
    assert os.path.realpath(tmp_path / "r" / "latest") == run.path
    assert run.alive()
    assert run.run_id == os.path.basename(run.path)
    lock.close()
    assert not run.alive()


def test_find(tmp_path):
    root = str(tmp_path)
    first, lock1 = runs.create(root, "a.py")
    second, lock2 = runs.create(root, "b.py")
    lock1.close()
    lock2.close()

    assert runs.find(root, "latest") == second
    assert runs.find(root, first.run_id) == first
    assert runs.find(root, first.run_id[-6:]) == first
    assert runs.find(root, first.path) == first
    for name in ("nothing", "-", "/tmp"):
        with pytest.raises(runs.NoSuchRunError):
            runs.find(root, name)


def test_the_users_own_directory_is_used_and_guarded(tmp_path):
    run, lock = runs.create(str(tmp_path / "root"), "a.py", run_dir=str(tmp_path / "mine"))

    assert run.path == str(tmp_path / "mine")
    assert run.run_id != "mine"
    with pytest.raises(FileExistsError):
        runs.create(str(tmp_path / "root"), "a.py", run_dir=str(tmp_path / "mine"))
    lock.close()
    run.write("outcome", {"x": 1})
    again, lock = runs.create(str(tmp_path / "root"), "a.py", run_dir=str(tmp_path / "mine"))
    assert again.document("outcome") == {}
    lock.close()


def test_prune_spares_what_lives_or_never_ended(tmp_path):
    root = str(tmp_path)
    made = []
    for _ in range(4):
        run, lock = runs.create(root, "a.py")
        made.append((run, lock))
    for run, lock in made[1:]:
        run.write("outcome", {"status": "success"})
        lock.close()
    runs.prune(root, 1)
    left = {run.path for run in runs.all_runs(root)}

    assert made[0][0].path in left
    assert len(left) == 2
    made[0][1].close()


def test_half_written_documents_are_empty(tmp_path):
    run, lock = runs.create(str(tmp_path), "a.py")
    lock.close()
    (tmp_path / os.path.basename(run.path) / "outcome.json").write_text('{"a":')
    with open(run.file("events.jsonl"), "w") as stream:
        stream.write('{"event": "a"}\n{"event": "b')

    assert run.document("outcome") == {}
    assert [event["event"] for event in run.events()] == ["a"]


def test_evidence_is_kept_as_text_and_as_json(tmp_path):
    run, lock = runs.create(str(tmp_path), "t.py", None)
    lock.close()
    process = {"pid": 7, "state": "S", "wchan": None, "cpu": 1.0, "io": 2, "command": "python t.py"}
    message = {"rank": 3, "taken": 5.0, "mark": None, "processes": [{**process, "stacks": "Thread 0x1:\n"}]}
    run.keep_evidence(message)

    text = (Path(run.path) / "evidence/rank-3.stacks.txt").read_text()
    assert text == "pid 7, state S, waits in user space: python t.py\nThread 0x1:\n\n"
    document = json.loads((Path(run.path) / "evidence/rank-3.proc.json").read_text())
    assert document == {"taken": 5.0, "mark": None, "processes": [process]}
