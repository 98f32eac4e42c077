"""What supervision costs: a recorded collective, a training step, and the agent itself."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from timing import Row

COLLECTIVE = """
import os, sys, tempfile, timeit
import torch, torch.distributed as dist
from safelaunch.remote import rank_hook
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, tensor = dist.group.WORLD, torch.ones(64, 64)
class Collectives:
    group_name = property(lambda self: group.group_name)
    def allreduce(self, tensors, options): return None
class Hooked(Collectives):
    def allreduce(self, tensors, options): return None
mark = rank_hook.Mark(os.path.join(tempfile.mkdtemp(dir=sys.argv[1]), "rank-0"))
place = rank_hook.itertools.count(1), rank_hook.GROUPS_AT
mark.group = lambda process_group: mark.groups.setdefault(process_group.group_name, place)
mark.wrap_collective(Hooked, "allreduce")
def cost(owner):
    call = owner().allreduce
    return min(timeit.repeat(lambda: call([tensor], None), number=50_000, repeat=5)) / 50_000
print((cost(Hooked) - cost(Collectives)) * 1e6)
"""
STEPS = """
import os, statistics, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
hooked = {
    (owner, name): getattr(owner, name)
    for owner in (ProcessGroup, Work)
    for name in dir(owner)
    if hasattr(getattr(owner, name), "__wrapped__")
}
assert len(hooked) > 20
def plain(method):
    return lambda self, *args, **options: method.__wrapped__(self, *args, **options)
x, y, times = torch.ones(32, 256), torch.zeros(32, 256), {True: [], False: []}
for block in range(60):
    on = block % 2 == 0  # the same process, the same second: two runs differ by more than the hook costs
    for (owner, name), method in hooked.items():
        setattr(owner, name, method if on else plain(method))
    for step in range(25):
        started = time.perf_counter()
        model(x).square().mean().backward()
        for _ in range(5):
            dist.all_reduce(y)
        optimizer.step(); optimizer.zero_grad()
        if block > 1: times[on].append(time.perf_counter() - started)
dist.barrier()
if dist.get_rank() == 0: print("medians", *(statistics.median(times[on]) for on in (True, False)))
sys.stdout.flush()
os._exit(0)  # torch's gloo now and then aborts while the interpreter is torn down
"""
IDLE = "import time\nprint('rank', flush=True)\ntime.sleep(60)\n"
WATCHED_SECONDS = 20


def measure(rounds: int, directory: str) -> list[Row]:
    """Return the rows of hook, step and agent."""
    return [_collective(rounds, directory), _step(rounds, directory), *_agent(directory)]


def _collective(rounds: int, directory: str) -> Row:
    command = [sys.executable, "-c", COLLECTIVE, directory]
    costs = [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    return Row(name="hook: a recorded collective", value=statistics.median(costs), unit="us", bound=1.0)


def _launch(directory: str, script: str, slots: int, *options: str) -> tuple[list[str], dict[str, str]]:
    path = os.path.join(directory, "hook-script.py")
    with open(path, "w") as stream:
        stream.write(script)
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "SAFELAUNCH_RUN_ROOT": os.path.join(directory, "runs"),
    }
    command = [sys.executable, "-m", "safelaunch", "--num_gpus", str(slots), *options, path]
    return command, environment


def _step(rounds: int, directory: str) -> Row:
    command, environment = _launch(directory, STEPS, 2)
    ratios, plain = [], []
    for _ in range(rounds):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        hooked, without = map(float, done.stdout.rpartition("medians ")[2].split())
        ratios.append(hooked / without)
        plain.append(without * 1e3)
    return Row(
        name="hook: step time of 2 gloo ranks, hooked / not",
        value=statistics.median(ratios),
        unit="x",
        bound=1.01,
        peers={"not hooked (ms)": statistics.median(plain)},
    )


def _agent(directory: str) -> list[Row]:
    command, environment = _launch(directory, IDLE, 8)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        for _ in range(8):
            process.stdout.readline()
        with open(os.path.join(directory, "runs/latest/events.jsonl")) as stream:
            pid = next(event["pid"] for event in map(json.loads, stream) if event["event"] == "agent_started")
        time.sleep(2)
        before = _cpu(pid)
        time.sleep(WATCHED_SECONDS)
        share = (_cpu(pid) - before) / WATCHED_SECONDS * 100
        with open(f"/proc/{pid}/status") as stream:
            memory = next(int(line.split()[1]) / 1024 for line in stream if line.startswith("VmRSS"))
    finally:
        process.terminate()
        process.wait()
    return [
        Row(name="agent: CPU with 8 ranks", value=share, unit="% core", bound=1.0),
        Row(name="agent: memory with 8 ranks", value=memory, unit="MB", bound=40.0),
    ]


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
