"""Jobs that stand still on real nodes: who is named, where, and what happens then."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.deepspeed, pytest.mark.timeout(300)]

ALLOWANCE = "6"
START = """
import atexit, os, sys, threading, time
import torch, torch.distributed as dist
# torch's gloo now and then aborts while the interpreter is torn down.
atexit.register(lambda: (sys.stdout.flush(), os._exit(hasattr(sys, "last_value"))))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(4)
for step in range(3):
    dist.all_reduce(x)
print("rank", rank, "ready", flush=True)
"""
DEEPSPEED = """
import deepspeed, torch, torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from torch.utils.data import DataLoader, Dataset
__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
deepspeed.init_distributed()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

class Samples(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index > 8 and dist.get_rank() == 2:
            import time; time.sleep(1000)  # the culprit
        return torch.ones(8)

for batch in DataLoader(Samples(), batch_size=2, num_workers=1):
    engine.backward(engine(batch).square().mean())
    engine.step()
"""


def line_of(text, script):
    return 1 + next(number for number, line in enumerate(script.splitlines()) if text in line)


def hang(safelaunch, script, *options, **settings):
    path = safelaunch.write("t.py", script)
    result = safelaunch.run(
        "--hostfile",
        "hosts",
        "--hang-timeout",
        ALLOWANCE,
        "--env",
        "DS_ACCELERATOR=cpu",
        *options,
        "t.py",
        **settings,
    )
    assert safelaunch.bed.wait_until_nobody_is_left(2) == []
    return result, path


def test_a_stuck_data_loader_worker_of_a_deepspeed_job(safelaunch):
    result, path = hang(safelaunch, DEEPSPEED)

    assert result.status == 75, result.stderr
    culprit = result.outcome["culprit"]
    assert (culprit["ranks"], culprit["hosts"], culprit["reason"]) == (
        [2],
        ["node2"],
        "stuck_outside_collective",
    )
    assert culprit["location"] == f"{path}:{line_of('the culprit', DEEPSPEED)}"
    assert result.outcome["status"] == "hang"
    assert [group["ranks"] for group in result.outcome["others"]] == [[0, 1, 3]]
    assert f"rank 2 on node2 stands still at {culprit['location']}" in result.stderr
    assert (result.run_dir / "evidence/rank-2.stacks.txt").read_text().count("pid ") >= 2
    assert max(row["ended"] for row in result.outcome["ranks"]) - culprit["since"] < 30


def test_different_collectives_are_out_of_step(safelaunch):
    script = START + "if rank == 3: dist.broadcast(x, 0)\nelse: dist.all_reduce(x)\ntime.sleep(1000)\n"
    result, _ = hang(safelaunch, script)

    assert result.status == 76, result.stderr
    assert result.outcome["status"] == "desync"
    assert result.outcome["culprit"]["ranks"] == [3]
    assert result.outcome["culprit"]["reason"] == "collective_mismatch"
    assert any("broadcast of 4 float32" in reason for reason in result.outcome["reasons"])


def test_a_stopped_rank_is_reported_and_the_run_goes_on_when_it_does(safelaunch):
    script = (
        START
        + """
if rank == 1: os.kill(os.getpid(), 19)
dist.barrier()
print("rank", rank, "done", flush=True)
dist.destroy_process_group()
"""
    )
    safelaunch.write("t.py", script)
    job = safelaunch.start("--hostfile", "hosts", "--hang-timeout", ALLOWANCE, "--on-hang", "report", "t.py")
    found = job.wait_for_event(event="hang", seconds=90)
    assert (found["reason"], found["ranks"], found["hosts"]) == ("stopped", [1], ["node1"])
    started = job.wait_for_event(event="rank_started", rank=1)
    inside = next(
        pid
        for pid in safelaunch.bed.processes(1)
        if re.search(rf"NSpid:.*\b{started['pid']}$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    )
    os.kill(inside, signal.SIGCONT)
    result = job.wait()

    assert result.status == 0, result.stderr
    assert job.wait_for_event(event="hang_cleared")
    assert result.stdout.count("done") == 4


def test_who_works_is_not_killed(safelaunch):
    script = (
        START
        + """
if rank == 0:
    end = time.time() + 16
    while time.time() < end: pass
dist.barrier()
"""
    )
    result, _ = hang(safelaunch, script)

    assert result.status == 0, result.stderr
    (slow,) = [event for event in result.events if event["event"] == "slow"]
    assert slow["ranks"] == [0]
    assert "t.py:" in slow["text"]


def test_an_endless_loop_is_a_hang_in_the_end(safelaunch):
    script = START + "if rank == 2:\n    while True: pass\ndist.barrier()\n"
    safelaunch.write("safelaunch.toml", "busy_factor = 1.5\n")
    result, path = hang(safelaunch, script)

    assert result.status == 75, result.stderr
    assert result.outcome["culprit"]["ranks"] == [2]
    assert result.outcome["culprit"]["location"] == f"{path}:{line_of('while True', script)}"


def test_a_thread_that_keeps_a_rank_from_ending(safelaunch):
    script = (
        START
        + """
dist.destroy_process_group()
if rank == 3: threading.Thread(target=time.sleep, args=(1000,)).start()
"""
    )
    result, _ = hang(safelaunch, script)

    assert result.status == 75, result.stderr
    assert (result.outcome["culprit"]["ranks"], result.outcome["culprit"]["reason"]) == ([3], "exit_hang")


def test_without_the_hook_silence_of_all_is_still_seen(safelaunch):
    result, _ = hang(safelaunch, START + "time.sleep(1000)\n", "--no-rank-hook")

    assert result.status == 75, result.stderr


def test_off_is_off(safelaunch):
    script = START + "time.sleep(9)\n"
    safelaunch.write("t.py", script)
    result = safelaunch.run("--hostfile", "hosts", "--hang-timeout", "off", "t.py")

    assert result.status == 0
    assert not [event for event in result.events if event["event"] in ("suspicion", "hang")]
