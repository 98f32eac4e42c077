"""What can go wrong while a job runs, as scripts for real DeepSpeed, each with the verdict it must get."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed import Bed, Running

BASE = '''
import atexit, os, sys, threading, time
import deepspeed, torch, torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from torch.utils.data import DataLoader, Dataset
__compatible_ops__["deepspeed_shm_comm"] = False  # saves a compilation of half a minute
torch.set_num_threads(1)
# torch's gloo now and then aborts while the interpreter is torn down.
atexit.register(lambda: (sys.stdout.flush(), os._exit(hasattr(sys, "last_value"))))
rank = int(os.environ["RANK"])
ALLOWANCE = float(os.environ.get("FAULT_ALLOWANCE", "10"))

def fault():
    """Note when the fault begins."""
    with open(f"fault-{rank}", "w") as stream:
        stream.write(str(time.time()))

class Samples(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        sample(index)
        return torch.ones(8)

def sample(index): pass
def before_init(): pass
def before_step(step, engine): pass
def after_step(step, engine): pass
def at_end(engine): pass
steps, workers = 8, 0
#FAULT
before_init()
deepspeed.init_distributed()
model = torch.nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
half = dist.new_group([0, 2])
print("rank", rank, "ready", flush=True)
for step, batch in zip(range(steps), DataLoader(Samples(), batch_size=2, num_workers=workers)):
    before_step(step, engine)
    engine.backward(engine(batch).square().mean())
    engine.step()
    after_step(step, engine)
at_end(engine)
dist.destroy_process_group()
'''


@dataclass(frozen=True)
class Fault:
    """A row: `body` goes into BASE; `act` is done from outside once all ranks are ready.

    `culprits` and `reason` are what the verdict must say; None is no verdict and exit 0. `within` is the
    allowance in units of --hang-timeout by which the verdict must be there.
    """

    name: str
    body: str = ""
    reason: str | None = None
    culprits: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    status: int = 0
    line: str | None = None
    options: tuple[str, ...] = ()
    within: float = 1.0
    act: Callable[[Bed, Running], None] | None = None
    event: str | None = None


def _at(step: int, rank: int, code: str) -> str:
    lines = "".join(f"        {line}\n" for line in code.splitlines())
    return (
        f"def before_step(step, engine):\n    if step == {step} and rank == {rank}:\n        fault()\n{lines}"
    )


def _kill_launcher(bed: Bed, _run: Running) -> None:
    os.kill(bed.pid(2, "deepspeed.launcher.launch"), signal.SIGKILL)


def _link_down(bed: Bed, _run: Running) -> None:
    bed.fault("link-down", 2)


STUCK, HELD, STEP, CRASH = "stuck_outside_collective", 75, 76, 1
LONG = "def after_step(step, engine):\n    time.sleep(0.3)\nsteps = 400\n"

FAULTS = (
    Fault(
        "sleep in the training step",
        _at(3, 2, "time.sleep(1000)  # HERE"),
        STUCK,
        (2,),
        ("node2",),
        HELD,
        "HERE",
    ),
    Fault(
        "endless Python loop",
        _at(3, 1, "while True: pass  # HERE"),
        STUCK,
        (1,),
        ("node1",),
        HELD,
        "HERE",
        within=6.0,
    ),
    Fault(
        "stuck DataLoader worker",
        "workers = 1\ndef sample(index):\n    if rank == 2 and index == 9:\n        fault()\n"
        "        time.sleep(1000)  # HERE\n",
        STUCK,
        (2,),
        ("node2",),
        HELD,
        "HERE",
    ),
    Fault(
        "stale lock of torch_extensions",
        _at(
            2,
            3,
            "from torch.utils.file_baton import FileBaton\nopen('lock', 'w')\n"
            "FileBaton('lock').wait()  # HERE",
        ),
        "jit_lock",
        (3,),
        ("node2",),
        HELD,
        "HERE",
    ),
    Fault(
        "blocked on a FIFO",
        _at(2, 0, "os.mkfifo('fifo')\nopen('fifo').read()  # HERE"),
        STUCK,
        (0,),
        ("node1",),
        HELD,
        "HERE",
    ),
    Fault(
        "one rank skips an all-reduce",
        "def before_step(step, engine):\n    if step == 3 and rank == 1: fault()\n"
        "    if not (step == 3 and rank == 1): dist.all_reduce(torch.ones(5))\n",
        "missed_collective",
        (1,),
        ("node1",),
        STEP,
    ),
    Fault(
        "one rank runs one batch fewer",
        "steps = 6 if rank == 2 else 7\ndef at_end(engine):\n    if rank == 2: fault()\n",
        "missed_collective",
        (2,),
        ("node2",),
        STEP,
    ),
    Fault(
        "rank 0 alone calls a collective in its save",
        "def after_step(step, engine):\n    if step == 2 and rank == 0:\n        fault()\n"
        "        dist.barrier()\n        torch.save({}, 'x')\n",
        "collective_mismatch",
        (0,),
        ("node1",),
        STEP,
    ),
    Fault(
        "another operation on one rank",
        _at(2, 3, "dist.broadcast(torch.ones(6), 0)")
        + "    elif step == 2: dist.all_reduce(torch.ones(6))\n",
        "collective_mismatch",
        (3,),
        ("node2",),
        STEP,
    ),
    Fault(
        "another shape on one rank",
        _at(2, 3, "dist.all_reduce(torch.ones(7))") + "    elif step == 2: dist.all_reduce(torch.ones(6))\n",
        "collective_mismatch",
        (3,),
        ("node2",),
        STEP,
    ),
    Fault(
        "a mismatch inside a sub-group",
        _at(2, 2, "dist.broadcast(torch.ones(6), 0, group=half)")
        + "    elif step == 2 and rank == 0: dist.all_reduce(torch.ones(6), group=half)\n",
        "collective_mismatch",
        (0, 2),
        ("node1", "node2"),
        STEP,
    ),
    Fault(
        "a rank exits 0 early",
        _at(3, 1, "sys.stdout.flush(); os._exit(0)"),
        "missed_collective",
        (1,),
        ("node1",),
        STEP,
    ),
    Fault("SIGSTOP", _at(3, 2, "os.kill(os.getpid(), 19)"), "stopped", (2,), ("node2",), HELD),
    Fault("SIGKILL", _at(3, 2, "os.kill(os.getpid(), 9)"), "rank_signalled", (2,), ("node2",), 137),
    Fault("SIGSEGV", _at(3, 2, "os.kill(os.getpid(), 11)"), "rank_signalled", (2,), ("node2",), 139),
    Fault(
        "no memory left (RLIMIT_AS)",
        _at(
            3,
            2,
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"
            "bytearray(1 << 30)  # HERE",
        ),
        "rank_exited",
        (2,),
        ("node2",),
        CRASH,
        "HERE",
    ),
    Fault(
        "two uncaught exceptions 0.2 s apart",
        "def before_step(step, engine):\n    if step == 3 and rank in (1, 2):\n        fault()\n"
        "        time.sleep(0.2 * (rank == 1))\n        raise ValueError(rank)  # HERE\n",
        "rank_exited",
        (2,),
        ("node2",),
        CRASH,
        "HERE",
    ),
    Fault(
        "a rank never comes to the start",
        "def before_init():\n    if rank == 3:\n        fault()\n        time.sleep(1000)  # HERE\n",
        "startup_stall",
        (3,),
        ("node2",),
        HELD,
        "HERE",
    ),
    Fault("a link goes down", LONG, "node_unreachable", (), ("node2",), 74, act=_link_down),
    Fault("the node launcher is killed", LONG, "launcher_died", (), ("node2",), 137, act=_kill_launcher),
    Fault(
        "hang at exit",
        "def at_end(engine):\n    if rank == 3:\n        fault()\n"
        "        threading.Thread(target=time.sleep, args=(1000,)).start()\n",
        "exit_hang",
        (3,),
        ("node2",),
        HELD,
    ),
    Fault(
        "slow preprocessing on rank 0",
        "def before_step(step, engine):\n    if step == 3 and rank == 0:\n"
        "        end = time.time() + 3 * ALLOWANCE\n        while time.time() < end: pass\n",
        event="slow",
    ),
    Fault(
        "slow and steady steps",
        "steps = 4\ndef before_step(step, engine):\n    time.sleep(0.45 * ALLOWANCE)\n",
    ),
    Fault(
        "a long checkpoint",
        "class Slow:\n    def flush(self): pass\n"
        "    def write(self, data):\n        if not hasattr(self, 'slept'): time.sleep(3 * ALLOWANCE)\n"
        "        self.slept = True\n        return len(data)\n"
        "def after_step(step, engine):\n    if step == 3 and rank == 0: torch.save({}, Slow())\n",
    ),
    Fault(
        "evaluation without steps",
        "def after_step(step, engine):\n    if step == 3:\n"
        "        engine.eval()\n        engine(torch.ones(2, 8))\n"
        "        time.sleep(2 * ALLOWANCE)\n        engine.train()\n",
    ),
)
