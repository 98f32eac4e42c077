"""Part of the probe: facts about the machine, its processes and its GPUs."""

from __future__ import annotations

import os
import re
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from safelaunch.remote.probe import Node

PROCESSES_KEPT = 50


def host(node: Node) -> dict[str, Any]:
    return {
        "hostname": os.uname().nodename,
        "machine_id": node.word("/etc/machine-id"),
        "boot_id": node.word("/proc/sys/kernel/random/boot_id"),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
    }


def environment(node: Node) -> dict[str, Any]:
    """Return {values, nccl_conf} of the names asked for: the node's own values, and those of NCCL's files.

    NCCL takes a variable from the environment, then from the user's file, then from the system's; a line
    counts only if nothing stands before its name.
    """
    wanted = node.config.get("environment", ())
    conf: dict[str, str] = {}
    for path in ("/etc/nccl.conf", node.setting("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")):
        for line in (node.word(path) or "").splitlines():
            name, equals, value = line.partition("=")
            if equals and name in wanted:
                conf[name] = value
    return {"values": {name: os.environ[name] for name in wanted if name in os.environ}, "nccl_conf": conf}


def addresses(node: Node) -> list[dict[str, Any]]:
    """Return [{interface, address, up}] of all addresses, IPv4 first, in the kernel's order."""
    import array  # noqa: PLC0415 - needed nowhere else
    import fcntl  # noqa: PLC0415

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        rows = array.array("B", bytes(65_536))
        request = struct.pack("iL", len(rows), rows.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(probe, 0x8912, request))[0]  # SIOCGIFCONF
        entry = struct.calcsize("16sPPP")  # struct ifreq
        raw = [bytes(rows[place : place + entry]) for place in range(0, used, entry)]
        pairs = [(row[:16].split(b"\0")[0].decode(), socket.inet_ntoa(row[20:24])) for row in raw]
        for line in (node.word("/proc/net/if_inet6") or "").splitlines():
            fields = line.split()
            pairs.append((fields[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))))
        for name, address in pairs:
            answer = fcntl.ioctl(probe, 0x8913, struct.pack("16s24x", name.encode()))  # SIOCGIFFLAGS
            running = bool(struct.unpack_from("H", answer, 16)[0] & 0x40)  # IFF_RUNNING: there is a carrier
            found.append({"interface": name.partition(":")[0], "address": address, "up": running})
    return found


def own_name(node: Node) -> dict[str, Any]:
    """Return {name, addresses, late}: how the node resolves its own host name; addresses None if unknown."""
    own = os.uname().nodename
    found, late = node.resolve([own])
    return {"name": own, "addresses": found.get(own), "late": bool(late)}


def shm(_node: Node) -> dict[str, int]:
    return space("/dev/shm")  # noqa: S108 - looked at, not written to


def space(path: str) -> dict[str, int]:
    values = os.statvfs(path)
    return {"free": values.f_bavail * values.f_frsize, "total": values.f_blocks * values.f_frsize}


def storage(node: Node) -> list[dict[str, Any]]:
    """Return [{use, path, at, device, free, total}] in bytes, or [{use, path, error}].

    `at` is the part of the path that exists.
    """
    temporary = node.setting("TMPDIR") or "/tmp"  # noqa: S108 - looked at, not written to
    wanted = [
        ("temporary files", temporary),
        ("files of safelaunch", os.environ.get("TMPDIR") or "/tmp"),  # noqa: S108 - as the agent chooses
        (
            "DeepSpeed's compiled extensions",
            node.setting("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions",
        ),
        ("Triton's cache", node.setting("TRITON_CACHE_DIR") or "~/.triton"),
        ("inductor's cache", node.setting("TORCHINDUCTOR_CACHE_DIR") or temporary),
    ]
    wanted += node.config.get("places", ())
    wanted += [("NVMe offload", path) for path in nvme_paths(node)]
    rows = [(use, node.path(path)) for use, path in wanted]
    distinct = sorted({path for _use, path in rows})
    limit = 0.8 * node.deadline("storage")
    calls = [lambda path=path: disk(path) for path in distinct]
    answers = dict(zip(distinct, node.together(calls, limit)))
    late = {"error": "no answer in %.0f s" % limit}
    return [{"use": use, "path": path, **(answers[path] or late)} for use, path in rows]


def disk(path: str) -> dict[str, Any]:
    at = path
    try:
        while not os.path.exists(at) and at != os.path.dirname(at):
            at = os.path.dirname(at)
        return {"at": at, "device": os.stat(at).st_dev, **space(at)}
    except OSError as error:
        return {"error": error.strerror}


def nvme_paths(node: Node) -> list[str]:
    """Return the offload directories that the DeepSpeed configs name, without judging the configs."""
    found: set[str] = set()
    for path in node.config.get("files", ()):
        text = node.word(node.path(path)) or ""
        if re.search(r"""device["']?\s*:\s*["']?nvme\b""", text):
            found.update(re.findall(r"""\bnvme_path["']?\s*:\s*["']?([^"'\s,}]+)""", text))
    return sorted(found - {"none", "null"})


def processes(node: Node) -> list[dict[str, Any]]:
    """Return this user's rank-like processes, and those of runs, that no living agent of ours looks after."""
    found = []
    mine = set(node.parents(os.getpid()))
    for pid in node.pids():
        try:
            if pid in mine or os.stat("/proc/%d" % pid).st_uid != os.getuid():
                continue
            environ = node.read("/proc/%d/environ" % pid)
            if b"SAFELAUNCH_RUN_ID=" in environ or b"RANK=" in environ:
                found.append(process(node, pid, environ))
        except OSError:  # it ended meanwhile
            continue
    return [row for row in found if row][:PROCESSES_KEPT]


def process(node: Node, pid: int, environ: bytes) -> dict[str, Any] | None:
    """Return {pid, run_id, rank, command, seconds, gpus, visible}; `gpus` are its open /dev/nvidia<N>."""
    pairs = [entry.decode(errors="replace").partition("=") for entry in environ.split(b"\0")]
    values = {name: value for name, _, value in pairs}
    commands = [node.command(parent) for parent in node.parents(pid)]
    ranked = {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= values.keys()
    supervised = any("safelaunch-agent" in command.split() for command in commands)
    if supervised or not (ranked or "SAFELAUNCH_RUN_ID" in values):
        return None
    started = float(node.read("/proc/%d/stat" % pid).rpartition(b")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    devices = set()
    for descriptor in os.listdir("/proc/%d/fd" % pid):
        try:
            match = re.match(r"/dev/nvidia(\d+)$", os.readlink("/proc/%d/fd/%s" % (pid, descriptor)))
        except OSError:  # closed meanwhile
            continue
        if match:
            devices.add(int(match.group(1)))
    return {
        "pid": pid,
        "run_id": values.get("SAFELAUNCH_RUN_ID"),
        "rank": values.get("RANK"),
        "command": node.short_command(pid),
        "seconds": float(node.read("/proc/uptime").split()[0]) - started,
        "gpus": sorted(devices),
        "visible": values.get("CUDA_VISIBLE_DEVICES"),
    }


def gpus(node: Node) -> dict[str, Any]:
    """Return {tool, status, output, limit} of `nvidia-smi -L`, or {accelerator} of DS_ACCELERATOR.

    `status` is None where the tool did not answer within `limit` seconds. Where it shows no GPU,
    `nvidia_devices` and `amd_gpus` say how many the machine itself sees.
    """
    accelerator = node.setting("DS_ACCELERATOR")
    if accelerator and accelerator != "cuda":
        return {"accelerator": accelerator}
    places = [*node.search_path(), "/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib"]
    tool = next((p + "/nvidia-smi" for p in places if os.access(p + "/nvidia-smi", os.X_OK)), None)
    found: dict[str, Any] = {"tool": tool, "status": None, "output": "", "limit": 0.9 * node.deadline("gpus")}
    if tool:
        found["status"], found["output"] = node.run([tool, "-L"], found["limit"], dict(os.environ))
    if "GPU 0:" not in found["output"]:
        found["nvidia_devices"] = nvidia_devices(node)
        found["amd_gpus"] = amd_gpus(node)
    return found


def nvidia_devices(node: Node) -> int:
    """Count NVIDIA's display controllers on the PCI bus (class 03xxxx: no bridges, no NVSwitches)."""
    root = "/sys/bus/pci/devices"
    names = os.listdir(root) if os.path.isdir(root) else []
    ours = [name for name in names if node.word("%s/%s/vendor" % (root, name)) == "0x10de"]
    return sum((node.word("%s/%s/class" % (root, name)) or "").startswith("0x03") for name in ours)


def amd_gpus(node: Node) -> int:
    """Count the GPUs of the ROCm driver; CPUs have the id 0 there."""
    root = "/sys/class/kfd/kfd/topology/nodes"
    names = os.listdir(root) if os.path.isdir(root) else []
    return sum((node.word("%s/%s/gpu_id" % (root, name)) or "0") != "0" for name in names)


COLLECTORS = (host, environment, addresses, own_name, shm, processes, storage, gpus)
