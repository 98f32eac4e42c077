"""Loaded in each rank before the user's code: keeps a progress mark that the agent reads.

It arrives as `sitecustomize.py` in a directory at the head of PYTHONPATH. The mark is a small file in mapped
memory: phase, step, and per process group how many collectives were begun, and which. Nothing here may raise
into, block or slow the user's code: whatever goes wrong switches the hook off.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import mmap
import os
import signal
import struct
import sys
import threading
import traceback
from time import monotonic_ns, time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MARK, OWNER = "SAFELAUNCH_MARK", "SAFELAUNCH_HOOK_PID"
"""Environment: path of the mark without suffix; pid of the rank's first Python, so that others keep off."""
MAGIC = b"SLMARK1\0"
SIZE = 16384
HEADER = struct.Struct("<8sIII")
"""At 0: magic, pid, signal that makes faulthandler write all stacks (0: none), bytes of a group's record."""
PHASE = struct.Struct("<IQ")
"""At 24: number of the phase, and since when; times are CLOCK_MONOTONIC in ns."""
STEP = struct.Struct("<QQ")
"""At 40: optimizer steps done, and when the last one was."""
DONE = struct.Struct("<QI")
"""At 56: when the last collective was waited for to its end; at 64: number of groups."""
PHASE_AT, STEP_AT, DONE_AT, GROUPS_AT, GROUP_SIZE, MOST_GROUPS = 24, 40, 56, 256, 96, 160
GROUP = tuple(struct.Struct("<QQHBB%dQ" % dimensions) for dimensions in range(9))
"""For each group: collectives begun, when the last was, its number in OPERATIONS, its data type in TYPES, and
the number of dimensions and the dimensions of its first tensor."""
PHASES = ("", "start", "import", "init", "first_step", "steady", "checkpoint", "evaluate", "finish")
OPERATIONS = (
    "",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""Methods of torch's ProcessGroup; all of torch.distributed and deepspeed.comm goes through them."""
BLOCKING = ("monitored_barrier",)
"""Those that return no Work to wait for."""
TYPES = ("", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "int8", "bool", "int16")
STACK_SIGNAL_FROM_TOP = 3
"""faulthandler's signal is SIGRTMAX minus this: C library and users take the lowest ones."""


class Mark:
    """The memory-mapped file of one rank, and the wrappers that write it."""

    def __init__(self, path: str) -> None:
        """Claim it; raises OSError where another process of the rank has it."""
        self.path = path
        self.fd = os.open(path + ".mark", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A hole in the file would be a SIGBUS for the rank once the disk is full.
        os.posix_fallocate(self.fd, 0, SIZE)
        self.map: Any = mmap.mmap(self.fd, SIZE)
        self.map[:] = bytes(SIZE)
        self.groups: dict[str, tuple[Any, int]] = {}
        self.phase_number = 0
        self.steps = 0
        self.by_engine = False
        HEADER.pack_into(self.map, 0, MAGIC, os.getpid(), register_stacks(path + ".stacks"), GROUP_SIZE)
        self.phase("start")

    def let_go(self) -> None:
        """Write nowhere from now on, as a forked child must: the mark is its parent's."""
        self.map = bytearray(SIZE)

    def off(self) -> None:
        """Stop, after a fault of our own; a mark that stood still would look like a rank that hangs."""
        try:
            self.map[: len(MAGIC)] = bytes(len(MAGIC))
        except Exception:
            pass
        self.let_go()

    def write(self, layout: struct.Struct, offset: int, *values: int) -> None:
        try:
            layout.pack_into(self.map, offset, *values)
        except Exception:
            self.off()

    def done(self) -> None:
        """Note that a collective has been waited for to its end."""
        try:
            DONE.pack_into(self.map, DONE_AT, monotonic_ns(), min(len(self.groups), MOST_GROUPS))
        except Exception:
            self.off()

    def phase(self, name: str) -> int:
        """Enter a phase; returns the one before, to be restored by `phase_back`."""
        before, self.phase_number = self.phase_number, PHASES.index(name)
        self.write(PHASE, PHASE_AT, self.phase_number, monotonic_ns())
        return before

    def phase_back(self, number: int) -> None:
        self.phase_number = number
        self.write(PHASE, PHASE_AT, number, monotonic_ns())

    def step(self) -> None:
        """Count an optimizer step."""
        self.steps += 1
        self.write(STEP, STEP_AT, self.steps, monotonic_ns())
        if self.phase_number != STEADY:
            self.phase("steady")

    def group(self, process_group: Any) -> tuple[Any, int]:
        """Give a process group its place; its name and members go into a file beside."""
        name = process_group.group_name
        index = min(len(self.groups), MOST_GROUPS)  # the last place is nobody's: it is never read
        # The counter is one step of the interpreter: threads may call at the same time.
        place = self.groups[name] = (itertools.count(1), GROUPS_AT + index * GROUP_SIZE)
        self.done()
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        try:
            members = sorted(c10d.get_process_group_ranks(process_group))
        except Exception:
            members = []
        row = {"index": index, "name": name, "about": process_group.group_desc, "ranks": members}
        with open(self.path + ".groups", "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        return place

    def wrap_collective(self, owner: Any, name: str) -> None:
        """Have a method of ProcessGroup note each call."""
        original = getattr(owner, name, None)
        if original is None:
            return
        mark, operation, types = self, OPERATIONS.index(name), _type_numbers()
        structs, blocks = GROUP, name in BLOCKING

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                place = mark.groups.get(self.group_name) or mark.group(self)
                count = next(place[0])
                tensor: Any = args[0] if args else None
                while type(tensor) is list:
                    tensor = tensor[0]
                if hasattr(tensor, "shape"):
                    shape = tensor.shape[-8:]
                    structs[len(shape)].pack_into(
                        mark.map,
                        place[1],
                        count,
                        monotonic_ns(),
                        operation,
                        types.get(tensor.dtype, 0),
                        len(shape),
                        *shape,
                    )
                else:
                    structs[0].pack_into(mark.map, place[1], count, monotonic_ns(), operation, 0, 0)
            except Exception:
                mark.off()
            result = original(self, *args, **kwargs)
            if blocks:
                mark.done()
            return result

        _disguise(method, original)
        setattr(owner, name, method)

    def wrap_wait(self, work: Any) -> None:
        """Have Work.wait note its end."""
        original, mark = work.wait, self

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            # Not after an exception: who failed inside a collective is still seen to have been there.
            mark.done()
            return result

        _disguise(wait, original)
        work.wait = wait

    def wrap_phase(self, owner: Any, name: str, phase: str, then: str | None = None) -> None:
        """Be in `phase` during a call, and afterwards in `then` or in the one before."""
        original = getattr(owner, name, None)
        if original is None:
            return
        mark = self

        def call(*args: Any, **kwargs: Any) -> Any:
            before = mark.phase(phase)
            try:
                return original(*args, **kwargs)
            finally:
                if then is None:
                    mark.phase_back(before)
                elif mark.phase_number == PHASES.index(phase):
                    mark.phase(then)

        _disguise(call, original)
        setattr(owner, name, call)

    def wrap_step(self, owner: Any, name: str) -> None:
        """Count a call as a step, once the optimizer's own boundary is reached."""
        original = getattr(owner, name, None)
        if original is None:
            return
        mark = self
        mark.by_engine = True

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                # DeepSpeed counts micro-steps in `step` too; only the last of an accumulation updates.
                if name != "step" or self.is_gradient_accumulation_boundary():
                    mark.step()
            except Exception:
                mark.step()
            return result

        _disguise(step, original)
        setattr(owner, name, step)

    def wrap_forward(self, owner: Any) -> None:
        """Tell training from evaluation by what a DeepSpeed engine's model is set to."""
        original, mark = owner.forward, self

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # The engine's own flag does not follow its model's.
            if not getattr(getattr(self, "module", self), "training", True):
                if mark.phase_number != EVALUATE:
                    mark.phase("evaluate")
            elif mark.phase_number == EVALUATE:
                mark.phase("steady" if mark.steps else "first_step")
            return original(self, *args, **kwargs)

        _disguise(forward, original)
        owner.forward = forward


def register_stacks(path: str) -> int:
    """Have a signal write the stacks of all threads to a file; return its number, or 0 if that can't be."""
    number = int(signal.SIGRTMAX) - STACK_SIGNAL_FROM_TOP
    try:
        stream = open(path, "ab", buffering=0)  # noqa: SIM115 - faulthandler keeps it
        faulthandler.register(number, file=stream, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError):
        return 0
    return number


STEADY, EVALUATE = PHASES.index("steady"), PHASES.index("evaluate")


def _disguise(wrapper: Any, original: Any) -> None:
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__signature__"):
        try:
            setattr(wrapper, attribute, getattr(original, attribute))
        except (AttributeError, TypeError):
            pass
    wrapper.__wrapped__ = original


def _type_numbers() -> dict[Any, int]:
    torch: Any = sys.modules["torch"]
    return {getattr(torch, name): number for number, name in enumerate(TYPES) if name}


# --- what is wrapped, by the module that brings it ----------------------------------------------------


def _torch(mark: Mark, _module: Any) -> None:
    if mark.phase_number == PHASES.index("import"):
        mark.phase("start")


def _distributed(mark: Mark, module: Any) -> None:
    core = sys.modules["torch._C._distributed_c10d"]
    for name in OPERATIONS[1:]:
        mark.wrap_collective(core.ProcessGroup, name)
    mark.wrap_wait(core.Work)
    mark.wrap_phase(module, "init_process_group", "init", "first_step")
    mark.wrap_phase(module, "destroy_process_group", "finish", "finish")


def _optimizer(mark: Mark, module: Any) -> None:
    def after(*_: Any) -> None:
        if not mark.by_engine:
            mark.step()

    module.register_optimizer_step_post_hook(after)


def _serialization(mark: Mark, module: Any) -> None:
    for name in ("save", "load"):
        mark.wrap_phase(module, name, "checkpoint")


def _engine(mark: Mark, module: Any) -> None:
    engine = module.DeepSpeedEngine
    mark.wrap_step(engine, "step")
    mark.wrap_forward(engine)
    for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"):
        mark.wrap_phase(engine, name, "checkpoint")


def _pipeline(mark: Mark, module: Any) -> None:
    mark.wrap_step(module.PipelineEngine, "train_batch")
    mark.wrap_phase(module.PipelineEngine, "eval_batch", "evaluate")


AFTER: dict[str, Callable[[Mark, Any], None]] = {
    "torch": _torch,
    "torch.distributed.distributed_c10d": _distributed,
    "torch.optim.optimizer": _optimizer,
    "torch.serialization": _serialization,
    "deepspeed.runtime.engine": _engine,
    "deepspeed.runtime.pipe.engine": _pipeline,
}


class Finder:
    """Stands first on sys.meta_path, and calls back when one of some modules has been loaded."""

    def __init__(self, after: dict[str, Callable[[Any], None]], before: Callable[[str], None]) -> None:
        self.after = dict(after)
        self.before = before

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        after = self.after.pop(name, None)  # before the search, which comes here again
        if after is None:
            return None
        self.before(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            try:
                after(module)
            except Exception:
                pass

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return None
        return spec


def hook_up(mark: Mark) -> None:
    """Wrap what is loaded already, and what will be."""
    later = {}
    for name, wrap in AFTER.items():
        if name in sys.modules:
            wrap(mark, sys.modules[name])
        else:
            later[name] = functools.partial(wrap, mark)

    def before(name: str) -> None:
        if name == "torch" and mark.phase_number == PHASES.index("start"):
            mark.phase("import")

    sys.meta_path.insert(0, Finder(later, before))  # type: ignore[arg-type]
    os.register_at_fork(after_in_child=mark.let_go)
    keep_exception(mark)
    noted = getattr(threading, "_register_atexit", atexit.register)
    noted(lambda: mark.phase("finish"))  # before the main thread waits for others


def keep_exception(mark: Mark) -> None:
    """Write what ends the process uncaught into a file beside the mark, before the usual goes on."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: Any, value: Any, trace: Any) -> None:
        try:
            if os.getpid() == pid:
                text = "".join(traceback.format_exception(kind, value, trace))
                row = {"time": time(), "error": "%s: %s" % (kind.__name__, value), "traceback": text}
                with open(mark.path + ".error.new", "w", encoding="utf-8", errors="replace") as stream:
                    json.dump(row, stream)
                os.replace(mark.path + ".error.new", mark.path + ".error")
        except Exception:
            pass
        before(kind, value, trace)

    sys.excepthook = hook


def _forget(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


def activate() -> None:
    """Set up the hook in the first Python of a rank, or in one below it that joins the job instead."""
    path = os.environ.get(MARK)
    if not path:
        return
    if os.environ.setdefault(OWNER, str(os.getpid())) == str(os.getpid()):
        hook_up(Mark(path))
        return

    # A data loader's worker that was spawned, say: it has stacks of its own, as a forked one has.
    own = "%s.%d.stacks" % (path, os.getpid())
    if register_stacks(own):
        atexit.register(_forget, own)

    def wrap(module: Any) -> None:
        original = module.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            distributed: Any = sys.modules["torch.distributed"]
            module.init_process_group = distributed.init_process_group = original
            try:
                hook_up(Mark(path + ".joined"))
            except Exception:  # such as OSError: another process of this rank was faster
                pass
            return module.init_process_group(*args, **kwargs)

        _disguise(init_process_group, original)
        module.init_process_group = init_process_group

    finder = Finder({"torch.distributed.distributed_c10d": wrap}, before=lambda _: None)
    sys.meta_path.insert(0, finder)


def chain() -> None:
    """Load the sitecustomize that ours hides, as Debian's Python has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path[:] = rest
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        activate()
    except Exception:
        pass
    chain()
