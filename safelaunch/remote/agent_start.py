"""Part of the agent: how DeepSpeed's node launcher is started."""

from __future__ import annotations

import os
import shlex
import signal
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from safelaunch.remote import agent_processes as procs


def catch_signals(stop: Callable[..., None]) -> tuple[socket.socket, Callable[[], bytes]]:
    """Wake the agent up for the end of children and for SIGTERM, which is an order to stop.

    Returns what to wait for, and what to call then.
    """
    waking, woken = socket.socketpair()
    for end in (waking, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, stop)
    # Handlers that do nothing, not SIG_IGN: the ranks would inherit that.
    for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)
    return woken, lambda: woken.recv(4096)


def environment(config: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the node launcher, from the node's own."""
    env = dict(os.environ)
    for pattern in config["unset"]:
        prefix = pattern[:-1] if pattern.endswith("*") else None
        for name in [n for n in env if n == pattern or (prefix and n.startswith(prefix))]:
            del env[name]
    env.update(config["env"])
    env["PWD"] = config["cwd"]  # as after a shell's cd
    env[procs.RUN_VARIABLE.rstrip("=")] = config["run_id"]
    env[procs.NODE_VARIABLE.rstrip("=")] = config["node"]
    return env


def command(config: dict[str, Any], directory: str) -> list[str]:
    """Return what starts the node launcher; raise FileNotFoundError without its --venv_script."""
    python = config["python"]
    options = ["-u", "-m", "deepspeed.launcher.launch", *config["launcher_options"]]
    options += ["--no_python", "--no_local_rank"]
    shim = ["-I", os.path.join(directory, "rank_shim.py"), directory]
    script = config.get("venv_script")
    if not script:
        return [python, *options, python, *shim]
    script = os.path.join(config["cwd"], os.path.expanduser(script))
    if not os.path.isfile(script):
        raise FileNotFoundError(2, "no such --venv_script", script)
    # As under deepspeed, `source X;`: whatever X returns, and with no arguments that it could take for
    # its own. What X activates (a venv or conda environment) is the interpreter from then on.
    text = (
        '. {}\np="${{VIRTUAL_ENV:-$CONDA_PREFIX}}/bin/python"; [ -x "$p" ] || p={}\n'
        'export SAFELAUNCH_PYTHON="$p"; exec "$p" {} "$p" {}'
    )
    words = [" ".join(map(shlex.quote, part)) for part in ([script], [python], options, shim)]
    shell = next((path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)), "/bin/sh")
    return [shell, "-c", text.format(*words)]
