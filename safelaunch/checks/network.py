"""Names, and where the ranks meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safelaunch.checks import gpus
from safelaunch.checks.base import ERROR, NOT_CHECKED, WARNING, Check, fold, groups
from safelaunch.facts import ip, is_loopback
from safelaunch.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from safelaunch.facts import Cluster, NodeFacts

CANDIDATES = 16
"""Addresses of node 0 that are tried, at most: a container host may have hundreds."""
NEIGHBOURS = 8
"""Names of other nodes that each node looks up: all pairs of a large cluster would flood its name servers."""


def own_name_loopback(cluster: Cluster) -> Iterator[Finding]:
    """Report nodes that know themselves by a loopback address, which gloo would tell its peers."""
    if len(cluster.plan.nodes) < 2:
        return
    for host, node in cluster.nodes.items():
        own = node["own_name"]
        first = (own["addresses"] or [None])[0]
        if own["late"]:
            yield _late("net.own_name_loopback", host, [own["name"]])
            continue
        if first is not None and not is_loopback(first):
            continue
        interface = _interface(node)
        by_variable = _names_interface(node, cluster.variable(host, "GLOO_SOCKET_IFNAME"))
        # NCCL goes by interface, never by name; gloo is then only a side channel.
        by_nccl = cluster.variable(host, "DS_ACCELERATOR") != "cpu" and gpus.count(node["gpus"]) > 0
        observed = f"its own name {own['name']} " + (f"resolves to {first}" if first else "does not resolve")
        address = node.address if node.address and not is_loopback(node.address) else "<its address>"
        yield Finding(
            code="net.own_name_loopback",
            severity=WARNING if by_variable or by_nccl else ERROR,
            hosts=(host,),
            observed=observed,
            why="gloo tells the other ranks the address of a node's own name: they would call themselves."
            + (" GLOO_SOCKET_IFNAME settles it here." if by_variable else "")
            + (" NCCL does not go by names, but what uses gloo beside it would fail." if by_nccl else ""),
            fix=f"--env GLOO_SOCKET_IFNAME={interface}   # or in its /etc/hosts: {address} {own['name']}",
        )


def _late(code: str, host: str, names: Sequence[str]) -> Finding:
    return Finding(
        code=code,
        severity=NOT_CHECKED,
        hosts=(host,),
        observed=f"no name server answered for {fold(names)} in time",
        why="Name servers that are slow or lose questions hold up each connection that goes by name.",
        fix=f"on the node: time getent ahosts {names[0]}; cat /etc/resolv.conf",
    )


def _interface(node: NodeFacts) -> str:
    """Return the interface that carries the address we reached, else the first that could."""
    rows = [row for row in node["addresses"] if row["up"] and not is_loopback(row["address"])]
    reached = [row["interface"] for row in rows if row["address"] == node.address]
    return str((reached + [row["interface"] for row in rows] + ["eth0"])[0])


def _names_interface(node: NodeFacts, value: str | None) -> bool:
    wanted = (value or "").split(",")
    return any(row["interface"] in wanted and not is_loopback(row["address"]) for row in node["addresses"])


def name_resolution(cluster: Cluster) -> Iterator[Finding]:
    """Report names of nodes that some node does not know, or knows by another address than the rest."""
    views: dict[str, dict[str, tuple[str, ...] | None]] = {}
    for host, node in cluster.nodes.items():
        for name, addresses in node["peers"]["results"].items():
            views.setdefault(name, {})[host] = None if addresses is None else tuple(addresses)
        if node["peers"]["late"]:
            yield _late("net.name_resolution", host, node["peers"]["late"])
    faults: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, view in views.items():
        for fault, hosts in _faults(cluster, name, view):
            faults.setdefault((fault, hosts), []).append(name)
    for (fault, hosts), names in faults.items():
        yield Finding(
            code="net.name_resolution",
            severity=ERROR,
            hosts=hosts,
            observed=f"{fold(names)}: {fault}",
            why="What goes by name (master address, MPI, ssh between nodes) fails or goes astray.",
            fix=f"getent ahosts {names[0]}   # on a good and a bad node; then correct /etc/hosts or DNS",
        )


def _faults(
    cluster: Cluster, name: str, view: Mapping[str, tuple[str, ...] | None]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is wrong with a name, and where; how a node sees its own name is another check's matter."""
    real = {host: a for host, a in view.items() if a and not is_loopback(a[0])}
    # A name that nobody else knows is one of the user's ssh configuration: no rank will use it.
    if real or name == cluster.plan.master_addr:
        unknown = tuple(host for host, addresses in view.items() if addresses is None and host != name)
        if unknown:
            yield "unknown there", unknown
    loops = {host: a[0] for host, a in view.items() if a and is_loopback(a[0]) and host != name}
    for address, hosts in groups(loops):
        yield f"resolves to {address} there, which is that node itself", hosts
    found = groups({host: addresses for host, addresses in real.items() if host != name})
    usual = set(found[0][0]) if found else set()
    for addresses, hosts in found[1:]:
        if not usual & set(addresses):
            yield (
                f"resolves to {', '.join(addresses)} there, but elsewhere to {', '.join(found[0][0])}",
                hosts,
            )


def names_to_resolve(cluster: Cluster) -> dict[str, list[str]]:
    """Return for each node the names that it should look up: some of its peers', its own, the master address.

    A hostfile name that is not the node's own name is one of the user's ssh configuration, or of an interface
    that only ssh uses; ranks never see it.
    """
    own = {
        host: str(node["own_name"]["name"])
        for host, node in cluster.nodes.items()
        if "own_name" in node.facts
    }
    real = [host for host, name in own.items() if _label(host) == _label(name)]
    master = cluster.plan.master_addr
    extra = [master] if master is not None and ip(master) is None else []
    if len(cluster.plan.nodes) < 2:
        return {host: [] for host in cluster.nodes}
    wanted = {}
    for index, host in enumerate(cluster.nodes):
        place = real.index(host) if host in real else index
        around = [real[(place + step) % len(real)] for step in range(min(NEIGHBOURS + 1, len(real)))]
        wanted[host] = list(dict.fromkeys([*extra, *around]))
    return wanted


def _label(name: str) -> str:
    return name.partition(".")[0].lower()


def port_busy(cluster: Cluster) -> Iterator[Finding]:
    """Report a master port that can't be had on node 0."""
    master = cluster.master
    if master is None:
        return
    if "port" in master.errors:
        yield Finding(
            code="port.busy",
            severity=NOT_CHECKED,
            hosts=(master.host,),
            observed=f"whether the master port is free: {master.errors['port']}",
            why="Rank 0 could not listen on a port that is taken.",
            fix="on the node: ss -ltnp",
        )
    port = master.facts.get("port", {})
    if "error" not in port:
        return
    holder = port["holder"]
    if holder and holder["pid"]:
        who = f"taken by pid {holder['pid']} of {holder['user']}: {holder['command']}"
        fix = f"on the node: kill {holder['pid']}   # or leave --master_port out, and a free one is chosen"
    else:
        who = f"taken by a process of {holder['user']}" if holder else f"not to be had: {port['error']}"
        fix = "leave --master_port out, and a free one is chosen"
    yield Finding(
        code="port.busy",
        severity=ERROR,
        hosts=(master.host,),
        observed=f"master port {port['wanted']} is {who}",
        why="Rank 0 could not listen there, or the ranks of two jobs would meet.",
        fix=fix,
    )


def master_unreachable(cluster: Cluster) -> Iterator[Finding]:
    """Report nodes that could not connect to a listener of ours where the ranks will meet."""
    address = master_address(cluster)
    master = cluster.plan.nodes[0].name
    failed: dict[str, tuple[str, str, int]] = {}
    for host, node in cluster.nodes.items():
        row = next((row for row in node["dial"] if row["address"] == address and not row["ok"]), None)
        if row:
            failed[host] = (row["kind"], row["error"], row["port"])
    for (kind, error, port), hosts in groups(failed):
        why, fix = _dial_advice(kind, port, fold([master]))
        theirs = cluster.master is not None and address in {
            row["address"] for row in _addresses(cluster.master)
        }
        if cluster.plan.master_addr == address and not theirs and kind in ("refused", "timeout", "stranger"):
            known = ", ".join(row["address"] for row in _addresses(cluster.master))
            why = f"{address} is no address of {master}, which has: {known or 'none that was seen'}."
            fix = "leave --master_addr out, and an address that every node reaches is chosen"
        yield Finding(
            code="net.master_unreachable",
            severity=ERROR,
            hosts=hosts,
            observed=f"can't connect to {master} at {address}:{port}, where safelaunch listened: {error}",
            why=why,
            fix=fix,
        )


def _dial_advice(kind: str, port: int, master: str) -> tuple[str, str]:
    opening = f"on {master}: sudo firewall-cmd --add-port={port}/tcp || sudo ufw allow {port}/tcp"
    return {
        "refused": (
            "A firewall rejects what the ranks need to meet, or the address leads elsewhere.",
            opening,
        ),
        "timeout": (
            "A firewall drops what the ranks need to meet, or there is no way between the networks.",
            opening,
        ),
        "stranger": (
            "Another machine or program has that address and port.",
            f"on {master}: ip -brief address",
        ),
        "name": ("The name of the master does not resolve there.", "--master_addr ADDRESS   # as a number"),
    }.get(
        kind,
        ("There is no way from there to that address.", "--master_addr ADDRESS   # one that all nodes reach"),
    )


def candidates(cluster: Cluster) -> list[str]:
    """Return where the ranks could meet, the best first: the user's choice alone, else what node 0 has."""
    if cluster.plan.master_addr is not None:
        return [cluster.plan.master_addr]
    if len(cluster.plan.nodes) == 1:
        return ["127.0.0.1"]
    master = cluster.master
    if master is None:
        return []
    found = [master.address] if master.address and _usable(master.address) else []
    own = [row["address"] for row in _addresses(master) if row["up"] and _usable(row["address"])]
    return list(dict.fromkeys([*found, *own]))[:CANDIDATES]


def master_address(cluster: Cluster) -> str | None:
    """Return the first candidate that every node reached, else the one that most did; None without any."""
    reached: dict[str, int] = dict.fromkeys(candidates(cluster), 0)
    for node in cluster.nodes.values():
        for row in node.facts.get("dial", ()):
            if row["ok"] and row["address"] in reached:
                reached[row["address"]] += 1
    return max(reached, key=lambda address: reached[address], default=None)


def _usable(address: str) -> bool:
    parsed = ip(address)
    return parsed is not None and not is_loopback(address) and not parsed.is_link_local


def _addresses(node: NodeFacts | None) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = node.facts.get("addresses", ()) if node is not None else ()
    return rows


CHECKS = (
    Check(
        ("net.own_name_loopback",),
        own_name_loopback,
        facts=("own_name", "addresses", "environment", "gpus"),
        requires=("hostfile.alias",),  # names of one machine do reach each other by loopback
    ),
    Check(("net.name_resolution",), name_resolution, facts=("peers",)),
    Check(("port.busy",), port_busy),
    Check(("net.master_unreachable",), master_unreachable, facts=("dial",)),
)
