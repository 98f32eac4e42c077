"""GPUs as `nvidia-smi -L` shows them, against the devices of the plan."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from safelaunch.checks.base import ERROR, NOT_CHECKED, WARNING, Check, duration, number
from safelaunch.checks.reach import shorten
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safelaunch.facts import Cluster

_GPU = re.compile(r"^GPU \d+: .*\(UUID: ", re.MULTILINE)
_MIG = re.compile(r"^\s+MIG .*\(UUID: ", re.MULTILINE)
_INFOROM_CORRUPT = 14
"""NVML's return code of a GPU that works but whose infoROM is damaged: nvidia-smi prints as ever."""
_NO_GPU = "no devices were found"
_FAILURES = (
    # What nvidia-smi prints (facts: NVML's error texts and public reports), what it means, what to do.
    (
        "couldn't communicate with the nvidia driver",
        "The kernel module of the driver is not loaded, or was not built for the running kernel.",
        "on the node: sudo modprobe nvidia || sudo dkms autoinstall",
    ),
    (
        "driver/library version mismatch",
        "The driver was upgraded while the old one runs; running jobs go on, new ones fail.",
        "on the node: sudo reboot   # then hold the driver's package back from automatic upgrades",
    ),
    (
        "failed to initialize nvml: unknown error",
        "A container lost the right to its devices (a systemd reload does that), or the driver is broken.",
        "restart the container; on the host: sudo dmesg | grep -i -e nvrm -e xid",
    ),
    (
        "insufficient permissions",
        "This user may not open /dev/nvidia*.",
        "on the node: ls -l /dev/nvidia*; sudo usermod -aG video,render $USER",
    ),
    (
        "unable to determine the device handle",
        "A GPU has fallen off the bus (Xid 79), or its firmware does not answer; others may still be listed.",
        "on the node: sudo dmesg | grep -i xid; sudo reboot   # or leave the node out: --exclude",
    ),
    (
        "gpu is lost",
        "A GPU has fallen off the bus (Xid 79).",
        "on the node: sudo reboot   # or leave it out: --exclude",
    ),
    (
        "requires reset",
        "The driver asks for a reset of a GPU.",
        "on the node: sudo nvidia-smi --gpu-reset -i <GPU>",
    ),
    ("err!", "The firmware of a GPU does not answer (often Xid 119 or 120).", "on the node: sudo reboot"),
)


def count(gpus: Mapping[str, Any]) -> int:
    """Return how many devices CUDA or ROCm can give to ranks; each MIG slice is one."""
    output = gpus.get("output", "")
    slices = len(_MIG.findall(output))
    if slices:
        whole = re.split(r"^(?=GPU )", output, flags=re.MULTILINE)
        return slices + sum(bool(_GPU.match(part)) and not _MIG.search(part) for part in whole)
    return len(_GPU.findall(output)) or int(gpus.get("amd_gpus", 0))


def tool(cluster: Cluster) -> Iterator[Finding]:
    """Report an nvidia-smi that fails, hangs, or is not there although the GPUs are."""
    for host, node in cluster.nodes.items():
        gpus = node["gpus"]
        if "accelerator" in gpus or (not gpus["tool"] and not gpus.get("nvidia_devices")):
            continue
        if gpus["tool"] and gpus["status"] is None:
            yield Finding(
                code="gpu.tool_stuck",
                severity=ERROR,
                hosts=(host,),
                observed=f"nvidia-smi did not answer within {duration(gpus['limit'])}",
                why="A GPU or its driver hangs; ranks there would hang in the same way, beyond SIGKILL.",
                fix="on the node: sudo dmesg | grep -i -e nvrm -e xid; sudo reboot   # or --exclude it",
            )
            continue
        problem = _problem(gpus)
        if problem is not None:
            severity, observed, why, fix = problem
            yield Finding(
                code="gpu.tool_failed", severity=severity, hosts=(host,), observed=observed, why=why, fix=fix
            )


def _problem(gpus: Mapping[str, Any]) -> tuple[Any, str, str, str] | None:
    """Return severity, observed, why and fix of what nvidia-smi said; None if it is well."""
    devices = gpus.get("nvidia_devices", 0)
    output, status = gpus["output"], gpus["status"]
    lower = output.lower()
    if not gpus["tool"]:
        observed = f"no nvidia-smi, but {number(devices, 'NVIDIA device')} on the PCI bus"
        return (
            ERROR,
            observed,
            "The driver is not installed, or not in this container.",
            "on the node: lspci -d 10de:",
        )
    observed = f"nvidia-smi: {shorten(output) or 'no output'} (status {status})"
    for text, why, fix in _FAILURES:
        if text in lower:
            return ERROR, observed, why, fix
    if _NO_GPU in lower:
        if not devices:
            return None
        observed = f"nvidia-smi finds no device, but the PCI bus has {devices} of NVIDIA"
        why = "The driver could not start them, or this container was given none."
        return ERROR, observed, why, "on the node: sudo dmesg | grep -i nvrm"
    if status == _INFOROM_CORRUPT:
        why = "A GPU's infoROM is damaged; it works, but its error counters may be lost."
        return WARNING, observed, why, "on the node: nvidia-smi -q | grep -i -A3 inforom"
    if status:
        return ERROR, observed, "The driver does not work as it is.", "on the node: nvidia-smi"
    return None


def none(cluster: Cluster) -> Iterator[Finding]:
    """Report nodes without a GPU: wrong where others have some, else worth a word."""
    counts = {
        host: count(node["gpus"]) for host, node in cluster.nodes.items() if "accelerator" not in node["gpus"]
    }
    for host, node in cluster.nodes.items():
        kind = node["gpus"].get("accelerator", "cpu")
        if kind != "cpu":
            yield Finding(
                code="gpu.none",
                severity=NOT_CHECKED,
                hosts=(host,),
                observed=f"DS_ACCELERATOR={kind}: only NVIDIA and AMD GPUs are counted",
                why="Whether the node has as many devices as slots is not known.",
                fix="compare the slots of the hostfile with the devices of the node yourself",
            )
    some = any(counts.values())
    for host, found in counts.items():
        if not found:
            yield Finding(
                code="gpu.none",
                severity=ERROR if some else WARNING,
                hosts=(host,),
                observed="no GPU here"
                + (", but other nodes have some" if some else ", nor on any other node"),
                why="DeepSpeed falls back to the CPU without a word: this node would use gloo and the others"
                " NCCL, and all would hang."
                if some
                else "DeepSpeed falls back to the CPU; check that this is what you want.",
                fix=f"leave the node out: --exclude {host}"
                if some
                else "if it is meant: --env DS_ACCELERATOR=cpu",
            )


def too_few(cluster: Cluster) -> Iterator[Finding]:
    """Report nodes with fewer devices than the plan uses."""
    for node in cluster.plan.nodes:
        facts = cluster.nodes.get(node.name)
        if facts is None or "accelerator" in facts["gpus"]:
            continue
        found = count(facts["gpus"])
        if 0 < found <= max(node.slots):
            yield Finding(
                code="gpu.too_few",
                severity=ERROR,
                hosts=(node.name,),
                where=node.where,
                observed=f"device {max(node.slots)} is planned; the node has {number(found, 'GPU')}, from 0",
                why="A rank would fail with 'invalid device ordinal', and all others wait for it.",
                fix=f"in {cluster.plan.hostfile or 'the hostfile'}: {node.name} slots={found}",
            )


CHECKS = (
    Check(("gpu.tool_failed", "gpu.tool_stuck"), tool, facts=("gpus",)),
    Check(("gpu.none",), none, facts=("gpus",), requires=("gpu.tool_failed", "gpu.tool_stuck")),
    Check(
        ("gpu.too_few",), too_few, facts=("gpus",), requires=("gpu.tool_failed", "gpu.tool_stuck", "gpu.none")
    ),
)
