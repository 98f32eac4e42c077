"""What will be started where: a value, made before anything happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safelaunch.findings import Where

TransportName = Literal["auto", "ssh", "openssh", "srun", "local"]
Level = Literal["off", "quick", "standard", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A selected host: its name as in the hostfile and its device indices, in rank order."""

    name: str
    slots: tuple[int, ...]
    node_rank: int
    first_rank: int
    where: Where | None = None

    @property
    def ranks(self) -> range:
        """Global ranks on this node."""
        return range(self.first_rank, self.first_rank + len(self.slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What each rank runs.

    `kind` is `python` (`python -u script args`), `module` (`python -u -m script args`) or `program`
    (`--no_python`: the program itself). Arguments hold undecodable bytes as surrogate escapes.
    """

    script: str
    args: tuple[str, ...]
    kind: Literal["python", "module", "program"]
    local_rank: bool

    def command(self, interpreter: str) -> list[str]:
        """Return the argv up to where `--local_rank=N` goes in; the user's arguments follow that."""
        start = {"python": [interpreter, "-u"], "module": [interpreter, "-u", "-m"], "program": []}
        return [*start[self.kind], self.script]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that the ranks will get from us.

    `origin` says where it came from (a file and line, `--env`, `the launching shell`); `node` limits it
    to one host. The value may be a secret: only `environment.redact` may bring it near a document.
    """

    name: str
    value: str
    origin: str
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in seconds, and how many handshakes run at once."""

    ssh_timeout: float = 10.0
    fanout: int = 64
    grace: float = 10.0
    reconnect_grace: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that static validation settled; the nodes themselves have not been asked anything yet.

    `master_addr` and `master_port` are the user's own, or None where we choose. `launcher_options` are
    options of `deepspeed.launcher.launch` to pass on (`--bind_cores_to_rank` ...). `only_node` is the
    index given by `--no_ssh --node_rank`: this process starts that node alone, on this machine.
    `deepspeed_configs` are paths of DeepSpeed configs as the ranks will read them.
    """

    nodes: tuple[Node, ...]
    program: Program | None
    interpreter: str
    cwd: str
    transport: TransportName = "auto"
    level: Level = "standard"
    limits: Limits = field(default_factory=Limits)
    master_addr: str | None = None
    master_port: int | None = None
    ssh_port: int | None = None
    only_node: int | None = None
    launcher_options: tuple[str, ...] = ()
    rank_log_dir: str | None = None
    save_pid: bool = False
    venv_script: str | None = None
    rank_hook: bool = True
    environment: tuple[Variable, ...] = ()
    unset: tuple[str, ...] = ()
    deepspeed_configs: tuple[str, ...] = ()
    hostfile: str | None = None
    checks: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dirs: tuple[str, ...] = ()
    force: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def local_nodes(self) -> tuple[Node, ...]:
        """Nodes that this process starts: all, or the one of `--node_rank`."""
        return self.nodes if self.only_node is None else (self.nodes[self.only_node],)

    def node_of(self, rank: int) -> Node:
        """Return the node that holds a global rank."""
        return next(node for node in self.nodes if rank in node.ranks)

    def variables_for(self, node: str) -> dict[str, Variable]:
        """Return what a node's ranks get from us; a value for that node goes before one for all."""
        chosen = [v for v in self.environment if v.node is None]
        chosen += [v for v in self.environment if v.node == node]
        return {variable.name: variable for variable in chosen}
