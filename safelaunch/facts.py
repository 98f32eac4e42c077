"""What is known of the nodes: facts as the probe printed them, by host, beside the plan."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from safelaunch.transport.base import Unreachable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from safelaunch.plan import Plan
    from safelaunch.transport.base import Remark

ENVIRONMENT = (
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "NCCL_CONF_FILE",
    "NCCL_SOCKET_IFNAME",
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
)
"""Variables that checks and collectors look at; no other leaves the launching machine or a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one node showed. Shapes of `facts`: docs/reference/node-programs.md and the collectors.

    `seconds` is the time until the connection stood, `answer_seconds` from there to the probe's first word;
    `noise` is what the shell start-up printed; `errors` are facts that could not be read, with the reason.
    """

    host: str
    address: str = ""
    host_key: str | None = None
    seconds: float = 0.0
    answer_seconds: float = 0.0
    remarks: tuple[Remark, ...] = ()
    noise: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The plan, and every host that was contacted in the plan's order."""

    plan: Plan
    hosts: Mapping[str, NodeFacts | Unreachable]

    @property
    def nodes(self) -> dict[str, NodeFacts]:
        """The hosts that answered."""
        return {host: facts for host, facts in self.hosts.items() if isinstance(facts, NodeFacts)}

    @property
    def unreachable(self) -> dict[str, Unreachable]:
        """The hosts that did not."""
        return {host: facts for host, facts in self.hosts.items() if isinstance(facts, Unreachable)}

    @property
    def master(self) -> NodeFacts | None:
        """The node of rank 0, if it answered."""
        return self.nodes.get(self.plan.nodes[0].name)

    def without(self, hosts: Collection[str]) -> Cluster:
        """Return the cluster as a check sees it that must not look at some hosts."""
        return replace(self, hosts={host: facts for host, facts in self.hosts.items() if host not in hosts})

    def variable(self, host: str, name: str) -> str | None:
        """Return a variable as the ranks of a host will see it: ours, the node's own, NCCL's files."""
        chosen = self.plan.variables_for(host).get(name)
        if chosen is not None:
            return chosen.value
        environment = self.nodes[host].facts.get("environment", {"values": {}, "nccl_conf": {}})
        if name in environment["values"] and name not in self.plan.unset:
            return str(environment["values"][name])
        value = environment["nccl_conf"].get(name)
        return None if value is None else str(value)


def is_loopback(address: str) -> bool:
    """Tell whether an address reaches only the machine that uses it; False for a name."""
    parsed = ip(address)
    return parsed is not None and (parsed.is_loopback or parsed.is_unspecified)


def ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address as a value; None for a name. A zone (`%eth0`) is left out."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
