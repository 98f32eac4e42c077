"""The rank hook in real Python processes with real torch: what it notes, and that it harms nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import sshd
from agent_driver import wait_for

from safelaunch.remote import agent_progress, rank_hook

pytestmark = [pytest.mark.contract, pytest.mark.deepspeed]

SOURCE = resources.files("safelaunch.remote").joinpath("rank_hook.py").read_text(encoding="utf-8")
GLOO = """
import atexit, os, sys, time
import torch, torch.distributed as dist
# torch's gloo now and then aborts while the interpreter is torn down.
atexit.register(lambda: (sys.stdout.flush(), os._exit(hasattr(sys, "last_value"))))
dist.init_process_group('gloo')
"""


class Ranks:
    """Ranks on this machine, started as the shim will start them."""

    def __init__(self, directory: Path):
        self.directory = directory
        (directory / "hook").mkdir()
        (directory / "hook/sitecustomize.py").write_text(SOURCE)
        self.port = str(sshd.free_port())
        self.processes = []

    def start(self, script, *, world=2, argv=None, **environment):
        (self.directory / "t.py").write_text(script)
        for rank in range(world):
            env = {
                **os.environ,
                "PYTHONPATH": str(self.directory / "hook"),
                "SAFELAUNCH_MARK": self.path(rank),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.port,
                **environment,
            }
            argv = argv or [sys.executable, "t.py"]
            self.processes.append(
                subprocess.Popen(
                    argv,
                    cwd=self.directory,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        return self

    def path(self, rank):
        return str(self.directory / f"rank-{rank}")

    def reader(self, rank):
        return agent_progress.MarkReader(rank_hook, self.path(rank))

    def mark(self, rank):
        return self.reader(rank).read()

    def finish(self, statuses=None):
        outputs = [process.communicate(timeout=60)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == (statuses or [0] * len(outputs))
        return outputs

    def stop(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path):
    found = Ranks(tmp_path)
    yield found
    found.stop()


def test_all_kinds_of_collectives_are_counted_by_group(ranks):
    script = (
        GLOO
        + """
rank = dist.get_rank()
half = dist.new_group([0, 1])
x = torch.ones(3, 4)
dist.all_reduce(x)
work = dist.all_reduce(x, async_op=True); work.wait()
dist.broadcast_object_list([rank], 0); out = [None, None]; dist.all_gather_object(out, rank)
if rank: dist.send(x, 0)
else: dist.recv(x, 1)
dist.monitored_barrier()
dist.all_gather_into_tensor(torch.zeros(6, 4, dtype=torch.float16), torch.ones(3, 4, dtype=torch.float16))
dist.barrier(group=half)
dist.all_reduce(torch.ones(2, 5, 7, dtype=torch.int64), group=half)
"""
    )
    ranks.start(script).finish()
    first, second = ranks.mark(0), ranks.mark(1)

    for mark in (first, second):
        assert mark["phase"] == "finish"
        assert mark["inside"] is False
        world, half = mark["groups"].values()
        assert (half["count"], half["operation"], half["shape"], half["type"]) == (
            2,
            "allreduce",
            [2, 5, 7],
            "int64",
        )
        assert world["type"] == "float16"
        assert world["count"] >= 8
    reader = ranks.reader(0)
    reader.read()
    assert list(reader.members.values()) == [[0, 1], [0, 1]]
    assert [group["count"] for group in first["groups"].values()] == [
        group["count"] for group in second["groups"].values()
    ]


def test_a_waiting_rank_and_the_one_it_waits_for(ranks):
    script = (
        GLOO
        + """
x = torch.ones(2)
dist.all_reduce(x)
if dist.get_rank() == 1: time.sleep(300)  # the culprit
dist.all_reduce(x)
"""
    )
    ranks.start(script)

    def state(rank):
        mark = ranks.mark(rank) or {"groups": {}, "inside": None}
        return [group["count"] for group in mark["groups"].values()], mark["inside"]

    wait_for(lambda: state(0) == ([2], True) and state(1) == ([1], False))
    mark = ranks.mark(1)
    assert mark["phase"] == "first_step"

    os.kill(mark["pid"], mark["signal"])
    stacks = ranks.path(1) + ".stacks"
    wait_for(lambda: os.path.exists(stacks) and "the culprit" in _line_at(stacks, ranks.directory / "t.py"))
    assert ranks.processes[1].poll() is None


def _line_at(stacks, script):
    """Return the source line of the innermost frame of the script that the stacks name."""
    found = re.search(r't.py", line (\d+) in', Path(stacks).read_text())
    return script.read_text().splitlines()[int(found[1]) - 1] if found else ""


def test_children_leave_the_mark_alone(ranks):
    script = (
        GLOO
        + """
import multiprocessing, subprocess
from torch.utils.data import DataLoader
def work():
    dist.distributed_c10d.ProcessGroup.group_name  # wrapped here too
    import torch.optim
    torch.optim.SGD([torch.ones(1)], 0.1).step()
    torch.save({}, '/dev/null')
if __name__ == '__main__':
    x = torch.ones(2); dist.all_reduce(x)
    for method in ('fork', 'spawn'):
        child = multiprocessing.get_context(method).Process(target=work); child.start(); child.join()
        assert child.exitcode == 0, child.exitcode
    text = 'import torch.optim, torch; torch.save({}, "/dev/null")'
    subprocess.run([sys.executable, '-c', text], check=True)
    assert [batch.sum().item() for batch in DataLoader(torch.ones(4), num_workers=2)] == [1.0] * 4
    print('ok')
"""
    )
    # Spawned children import the module and would join the job again, but for the environment.
    script = script.replace(
        "dist.init_process_group('gloo')", "if __name__ == '__main__': dist.init_process_group('gloo')"
    )
    assert ranks.start(script, world=1).finish() == ["ok\n"]

    mark = ranks.mark(0)
    assert mark["pid"] == ranks.processes[0].pid
    assert mark["steps"] == 0
    assert not os.path.exists(ranks.path(0) + ".joined.mark")


def test_steps_phases_and_checkpoints(ranks):
    script = (
        GLOO
        + """
model = torch.nn.Linear(1, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3): model(torch.ones(1)).sum().backward(); optimizer.step()
def phase(): return open(os.environ['SAFELAUNCH_MARK'] + '.mark', 'rb').read(32)[24]
print(phase())
class Slow:
    def write(self, data): seen.append(phase()); return len(data)
    def flush(self): pass
seen = []
torch.save({}, Slow())
print(*set(seen), phase())
"""
    )
    (text,) = ranks.start(script, world=1).finish()
    names = [rank_hook.PHASES[int(word)] for word in text.split()]

    assert names == ["steady", "checkpoint", "steady"]
    assert ranks.mark(0)["steps"] == 3
    assert ranks.mark(0)["phase"] == "finish"


def test_a_python_below_a_wrapper_is_the_rank(ranks):
    wrapper = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 't.py']))"
    ranks.start(GLOO + "dist.barrier()\nprint('ok')\n", argv=[sys.executable, "-c", wrapper]).finish()

    for rank in (0, 1):
        assert [group["operation"] for group in ranks.mark(rank)["groups"].values()] == ["barrier"]
        assert ranks.mark(rank)["pid"] != ranks.processes[rank].pid


def test_what_ends_a_rank_uncaught_is_kept_and_still_printed(ranks):
    ranks.start("raise ValueError('no such shard')", world=1).finish([1])
    row = json.loads(Path(ranks.path(0) + ".error").read_text())

    assert row["error"] == "ValueError: no such shard"
    assert "line 1, in <module>" in row["traceback"]


def test_a_sitecustomize_further_down_is_loaded(ranks, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/sitecustomize.py").write_text("import builtins; builtins.theirs = 1\n")
    path = f"{tmp_path / 'hook'}:{tmp_path / 'theirs'}"
    script = """
import sys, sitecustomize
print(theirs, sitecustomize.__file__, len([p for p in sys.path if 'hook' in p]))
"""
    (text,) = ranks.start(script, world=1, PYTHONPATH=path).finish()

    assert text == f"1 {tmp_path}/theirs/sitecustomize.py 0\n"


@pytest.mark.parametrize("mark", ["/no/such/directory/rank-0", "", "/dev/null/x"])
def test_a_hook_that_can_not_work_does_nothing(ranks, mark):
    script = GLOO + "dist.all_reduce(torch.ones(1)); print('ok')"
    assert ranks.start(script, world=1, SAFELAUNCH_MARK=mark).finish() == ["ok\n"]


def test_a_mark_that_breaks_in_the_middle_stops_nobody(ranks):
    script = (
        GLOO
        + """
import sitecustomize
finder = next(f for f in sys.meta_path if type(f).__name__ == 'Finder')
mark = next(iter(finder.after.values())).args[0]
mark.map.close()
mark.groups.clear()
torch.save({}, '/dev/null'); dist.all_reduce(torch.ones(1)); dist.barrier()
print('ok')
"""
    )
    assert ranks.start(script, world=1).finish() == ["ok\n"]


def test_a_hook_that_switches_itself_off_leaves_no_mark(ranks):
    script = (
        GLOO
        + """
import sitecustomize
mark = next(iter(next(f for f in sys.meta_path if type(f).__name__ == 'Finder').after.values())).args[0]
mark.groups = None
dist.all_reduce(torch.ones(1))
print('ok')
"""
    )
    assert ranks.start(script, world=1).finish() == ["ok\n"]
    assert ranks.mark(0) is None


def test_tensors_and_groups_of_any_number_and_size(ranks):
    script = (
        GLOO
        + """
import sitecustomize
mark = next(iter(next(f for f in sys.meta_path if type(f).__name__ == 'Finder').after.values())).args[0]
class Huge:
    shape, dtype = (2**35, 3), torch.float32
class Group:
    group_desc = ""
    def __init__(self, name): self.group_name = name
    def allreduce(self, tensor): pass
mark.wrap_collective(Group, 'allreduce')
Group('first').allreduce(Huge())
dist.all_reduce(torch.ones([1] * 12))
for number in range(400): Group(f'group {number}').allreduce(torch.ones(2))
print('ok')
"""
    )
    assert ranks.start(script, world=1).finish() == ["ok\n"]
    mark = ranks.mark(0)
    assert mark["groups"]["first"]["shape"] == [2**35, 3]
    assert len(mark["groups"]) == rank_hook.MOST_GROUPS
    assert {group["count"] for group in mark["groups"].values()} == {1}


@pytest.mark.parametrize("place", [24, 64, 272, 275, 300])
def test_a_mark_of_nonsense_is_none_or_harmless(tmp_path, place):
    data = bytearray(rank_hook.SIZE)
    data[:8] = rank_hook.MAGIC
    data[64] = 1
    data[place] = 255
    (tmp_path / "rank-0.mark").write_bytes(data)
    (tmp_path / "rank-0.groups").write_text('{"name": "0", "ranks": [0]}\n' * 300)

    agent_progress.MarkReader(rank_hook, str(tmp_path / "rank-0")).read()


def test_the_users_own_signal_handlers_stay(ranks):
    script = "import signal\nprint({signal.getsignal(n) for n in signal.valid_signals() - {2, 13, 25}})\n"
    (text,) = ranks.start(script, world=1).finish()

    # faulthandler's own stays below what Python's signal module sees.
    assert text == "{<Handlers.SIG_DFL: 0>}\n"
    assert int(signal.SIGRTMAX) - rank_hook.STACK_SIGNAL_FROM_TOP > signal.SIGRTMIN
