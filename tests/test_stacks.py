"""Stacks as faulthandler really writes them."""

from __future__ import annotations

import faulthandler
import subprocess
import sys

from safelaunch.stacks import (
    Frame,
    grouped,
    is_in_collective,
    main_thread,
    parse,
    users_frame,
    waits_for_loader,
    waits_for_lock,
)

WAITING = """Thread 0x00007f1e8b7fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/opt/v/lib/python3.11/site-packages/tqdm/_monitor.py", line 60 in run
  File "/usr/lib/python3.11/threading.py", line 975 in _bootstrap

Current thread 0x00007f1f0f5a1740 (most recent call first):
  File "/opt/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/opt/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/ada/train.py", line 41 in step
  File "/home/ada/train.py", line 60 in <module>
"""


def test_threads_and_frames():
    threads = parse("noise\n" + WAITING)

    assert [len(thread) for thread in threads] == [3, 4]
    assert main_thread(WAITING)[0].function == "all_reduce"
    assert users_frame(main_thread(WAITING)) == Frame("/home/ada/train.py", 41, "step")
    assert users_frame(main_thread(WAITING)).place == "/home/ada/train.py:41"


def test_what_is_cut_off_or_strange_is_no_error():
    assert parse("") == []
    assert main_thread('  File "x.py", line 1 in f\n') == ()
    assert users_frame(()) is None
    assert parse(WAITING[:-30])[-1][-1].line == 41
    assert parse('Thread 0x01 (most recent call first):\n  File "x.py", line ??? in f\n')[0][0].line is None


def test_a_real_dump_of_a_real_process():
    program = "import faulthandler\ndef wait():\n    faulthandler.dump_traceback(all_threads=True)\nwait()\n"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert [(frame.line, frame.function) for frame in main_thread(done.stderr)] == [
        (3, "wait"),
        (4, "<module>"),
    ]
    assert faulthandler


def test_the_odd_one_out_comes_first():
    a, b = main_thread(WAITING), (Frame("/home/ada/train.py", 12, "load"),)

    assert grouped({0: a, 1: a, 2: b, 3: a}) == [([2], b), ([0, 1, 3], a)]


def test_who_is_in_a_collective():
    def inside(file):
        return is_in_collective((Frame(file, 1, "f"), Frame("/home/ada/train.py", 3, "f")))

    assert inside("/tmp/safelaunch-0/x.0/sitecustomize.py")
    assert inside("/v/site-packages/torch/distributed/distributed_c10d.py")
    assert inside("/v/site-packages/deepspeed/comm/torch.py")
    assert not inside("/v/site-packages/torch/distributed/checkpoint/filesystem.py")
    assert not inside("/home/ada/train.py")
    assert not is_in_collective(())


def test_places_where_ranks_wait_for_others_than_ranks():
    loader = "/v/site-packages/torch/utils/data/dataloader.py"
    user = Frame("/home/ada/train.py", 3, "f")

    assert waits_for_loader(
        (Frame("/usr/lib/python3.11/queue.py", 1, "get"), Frame(loader, 9, "_try_get"), user)
    )
    assert not waits_for_loader((user, Frame(loader, 9, "_try_get")))
    assert waits_for_lock((Frame("/v/site-packages/torch/utils/file_baton.py", 49, "wait"), user))
    assert not waits_for_lock((user,))
