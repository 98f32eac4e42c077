"""`safelaunch check` on the test bed, held to what every check promises; and what it leaves on the nodes."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jsonschema
from testbed import command, namespace

from safelaunch import runs

if TYPE_CHECKING:
    from testbed import Bed, SafeLaunch

TRANSPORTS = ["ssh", "openssh"]
NO_GPU = "gpu.none"
"""What a healthy bed is told: it has none."""
SECONDS = 15.0
"""What a check may take on a loaded machine; most take half a second."""


@dataclass(frozen=True)
class Checked:
    """What a check found: the document that it printed, and how long it took."""

    document: dict[str, Any]
    seconds: float

    @property
    def status(self) -> int:
        return self.document["exit_status"]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """All findings but the one that a healthy bed has too."""
        return [finding for finding in self.document["findings"] if finding["code"] != NO_GPU]

    @property
    def finding(self) -> dict[str, Any]:
        """The only finding."""
        assert len(self.findings) == 1, self.findings
        return self.findings[0]

    @property
    def failed(self) -> list[str]:
        """The hosts that are not fit."""
        return [host["name"] for host in self.document["hosts"] if host["state"] != "ok"]

    def is_error(self, code: str, *hosts: str, why: str = "", fix: str = "") -> None:
        """Assert that this is the only finding, that it refuses the launch, and what its fix contains."""
        found = self.finding
        assert (found["code"], found["severity"], found["hosts"]) == (code, "error", list(hosts)), found
        assert why in f"{found['observed']} {found['why']}", found
        assert fix in found["fix"], found
        assert self.status == 69
        assert self.failed == list(hosts)

    def is_warning(self, code: str, *hosts: str, why: str = "", fix: str = "") -> None:
        """Assert that this is the only finding, and that a launch would go on."""
        found = self.finding
        assert (found["code"], found["severity"], found["hosts"]) == (code, "warning", list(hosts)), found
        assert why in f"{found['observed']} {found['why']}", found
        assert fix in found["fix"], found
        assert self.status == 0
        assert self.failed == []


def check(safelaunch: SafeLaunch, *options: str, seconds: float = SECONDS) -> Checked:
    """Run `safelaunch check` on the file `hosts`; it must end in time, with JSON of the shipped schema."""
    result = safelaunch.run("check", "--hostfile", "hosts", "--preflight", "quick", "--json", *options)
    assert result.stdout.startswith("{"), f"{result.status}: {result.stdout}{result.stderr}"
    document = json.loads(result.stdout)
    jsonschema.validate(document, runs.schema("preflight"))
    assert result.stderr == ""
    assert document["exit_status"] == result.status
    assert document["ok"] is (result.status == 0)
    for finding in document["findings"]:
        assert all(finding[part] for part in ("observed", "why", "fix")), finding
    assert result.seconds < seconds, f"it took {result.seconds:.1f} s: {document['timing']}"
    return Checked(document, result.seconds)


def traces(bed: Bed) -> dict[str, Counter[str]]:
    """Return the commands of each node's processes and the files in its own directories."""
    found = {}
    for node in bed.status["nodes"]:
        seen = Counter(_processes(node["pid"]))
        for directory in ("tmp", "dev/shm", "run"):
            for place, _below, files in os.walk(f"/proc/{node['pid']}/root/{directory}"):
                seen.update(f"{place.partition('/root/')[2]}/{file}" for file in files)
        found[node["name"]] = seen
    return found


def _processes(init: int) -> list[str]:
    place = namespace(init)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [command(pid) for pid in pids if namespace(pid) == place]
