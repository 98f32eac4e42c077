"""Which hosts and devices take part: DeepSpeed's filters and counts, applied to the hosts there are.

The meaning is that of DeepSpeed 0.19.8 (`deepspeed/launcher/runner.py`), in which `--include host` takes all
slots of the host and a slot that the host does not have is refused; some older releases do neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from safelaunch import filters
from safelaunch.findings import Finding, Severity, Where, errors
from safelaunch.hostnames import fold, is_loopback, machine, nearest, quoted, show
from safelaunch.plan import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from safelaunch.hostfile import Host

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GROUPS_SHOWN = 16
"""Lines of a rank map that are printed; the rest is counted."""
_NEAREST_SHOWN = 10
"""Unknown names of one filter for which the nearest known ones are looked up."""
_GRAMMAR = "the form is NAME[:SLOT[,SLOT...]], several joined by `@`; deepspeed stops with a bare ValueError"


@dataclass(frozen=True, slots=True)
class Selection:
    """The nodes in rank order, and what is wrong with the choice."""

    nodes: tuple[Node, ...]
    findings: tuple[Finding, ...]


def select(
    hosts: Sequence[Host],
    *,
    include: str,
    exclude: str,
    num_nodes: int,
    num_gpus: int,
    visible_devices: str | None,
    explicit_hostfile: bool,
) -> Selection:
    """Apply the filters and counts of the command line to the hosts.

    `num_nodes` and `num_gpus` of 0 or less choose nothing; `visible_devices` is CUDA_VISIBLE_DEVICES of the
    launching shell, None where unset. It chooses devices only where there is no hostfile, that is where
    `hosts` is `localhost` alone and came from no file, and no other option chooses. Where a
    finding is an error, the nodes are only what could be made of it, and may be none.
    """
    pool = {host.name: host for host in hosts}
    local = not explicit_hostfile and len(hosts) == 1 and hosts[0].name == "localhost" and not hosts[0].where
    findings = list(_conflicts(include, exclude, num_nodes, num_gpus))
    chosen = {host.name: tuple(range(host.slots)) for host in hosts}
    for option, text in (("--include", include), ("--exclude", exclude)):
        if text:
            mentions, faults = _read_filter(option, text, pool, local=local)
            findings += faults
            if not (include and exclude):
                chosen = _apply(option, mentions, chosen)
    if not include and not exclude:
        chosen, faults = _counted(pool, chosen, num_nodes, num_gpus, local=local)
        findings += faults
    filtered = bool(include or exclude or num_nodes > 1 or num_gpus > 0)
    if local and not filtered and visible_devices:
        chosen, faults = _visible_here(visible_devices, hosts[0])
        findings += faults
    elif not errors(findings):
        findings += _visible_ignored(visible_devices, chosen, local=local, filtered=filtered)
    nodes = _nodes(pool, chosen)
    if not errors(findings):
        if not nodes and any(host.slots for host in hosts):
            findings.append(_nothing_left(include, exclude))
        findings += _loopback(nodes)
        findings += _uneven(nodes, filtered=bool(include or exclude))
    return Selection(nodes, tuple(findings))


def rank_map(nodes: Sequence[Node]) -> list[str]:
    """Return which ranks run on which nodes and devices, a line for each run of nodes that are alike.

    LOCAL_RANK is the rank modulo the node's slots (deepspeed/launcher/launch.py), so where the counts differ
    a node's first rank need not have its first device.
    """
    lines = []
    for (slots, turn), group in groupby(nodes, lambda node: (node.slots, node.first_rank % len(node.slots))):
        alike = list(group)
        first, last = alike[0].first_rank, alike[-1].ranks[-1]
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        each = f", {len(slots)} each," if len(alike) > 1 and len(slots) > 1 else ""
        devices = slots[turn:] + slots[:turn]
        noun = "device" if len(devices) == 1 else "devices"
        lines.append(f"{fold(node.name for node in alike)}: {ranks}{each} on {noun} {_runs(devices)}")
        if len(lines) == _GROUPS_SHOWN:
            left = len(nodes) - nodes.index(alike[-1]) - 1
            return [*lines, f"and {left} more nodes"] if left else lines
    return lines


def _runs(numbers: Sequence[int]) -> str:
    """Write numbers in their order, those that count up as a range: 2,3,0,1 is `2-3,0-1`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _nodes(pool: Mapping[str, Host], chosen: Mapping[str, tuple[int, ...]]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    first_rank = 0
    for name, slots in chosen.items():
        if slots:
            where = pool[name].where
            nodes.append(
                Node(name=name, slots=slots, node_rank=len(nodes), first_rank=first_rank, where=where)
            )
            first_rank += len(slots)
    return tuple(nodes)


def _conflicts(include: str, exclude: str, num_nodes: int, num_gpus: int) -> Iterator[Finding]:
    if include and exclude:
        yield Finding(
            code="select.conflict",
            severity=Severity.ERROR,
            observed="--include and --exclude are both given",
            why="deepspeed takes one of them at most",
            fix=f"leave out one: --include {quoted(include)} alone names all that takes part",
        )
    # Zero chooses nothing, and is in conflict all the same, as in deepspeed.
    counts = [
        f"{option} {number}"
        for option, number in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus))
        if number >= 0
    ]
    filters = [option for option, text in (("--include", include), ("--exclude", exclude)) if text]
    if counts and filters:
        yield Finding(
            code="select.conflict",
            severity=Severity.ERROR,
            observed=f"{' and '.join(counts)} together with {' and '.join(filters)}",
            why="deepspeed chooses by numbers or by names, not by both",
            fix=f"leave out {' and '.join(counts)}",
        )


def _read_filter(
    option: str, text: str, pool: Mapping[str, Host], *, local: bool
) -> tuple[list[filters.Mention], list[Finding]]:
    mentions, faults = filters.parse(text, pool)
    meant = filters.guess(text, pool) if faults else None
    example = show(next(iter(pool), "node1"))
    fix = quoted(meant) if meant else f"NAME:SLOT,SLOT@NAME, for example {option} {example}:0"
    findings = [
        Finding(
            code="select.syntax",
            severity=Severity.ERROR,
            observed=f"{fault.observed}: {option} {show(text)}",
            why=_GRAMMAR,
            fix=f"{option} {fix}",
            where=Where(option, 1, fault.offset + 1),
        )
        for fault in faults
    ]
    known = [mention for mention in mentions if mention.host in pool]
    unknown = [mention for mention in mentions if mention.host not in pool]
    # Where the hostfile gave no host at all, that has been said.
    findings += _unknown(option, text, unknown if pool else [], pool, local)
    findings += [
        _no_such_slot(f"{option} names", number, pool[mention.host], Where(option, 1, offset + 1))
        for mention in known
        for number, offset in mention.slots or ()
        if not 0 <= number < pool[mention.host].slots
    ]
    findings += _half_and_whole(option, known)
    return known, findings


def _half_and_whole(option: str, mentions: Iterable[filters.Mention]) -> Iterator[Finding]:
    whole = {mention.host: mention for mention in mentions if mention.slots is None}
    parts = {mention.host: mention for mention in mentions if mention.slots is not None}
    for host in (host for host in whole if host in parts):
        later = max(whole[host], parts[host], key=lambda mention: mention.offset)
        yield Finding(
            code="select.conflict",
            severity=Severity.ERROR,
            observed=f"{option} names {show(host)} once as a whole and once with slots",
            why="deepspeed then drops the whole host without a word and takes the slots alone",
            fix=f"{option} with {show(host)} named once",
            hosts=(host,),
            where=Where(option, 1, later.offset + 1),
        )


def _apply(
    option: str, mentions: Iterable[filters.Mention], slots: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Keep or drop what the filter names; the order of hosts and of slots stays that of the hostfile."""
    named: dict[str, set[int]] = {}
    for mention in mentions:
        own = slots[mention.host]
        named.setdefault(mention.host, set()).update(
            own if mention.slots is None else {number for number, _ in mention.slots}
        )
    keep = option == "--include"
    return {
        host: tuple(slot for slot in own if (slot in named.get(host, ())) is keep)
        for host, own in slots.items()
    }


def _counted(
    pool: Mapping[str, Host],
    chosen: dict[str, tuple[int, ...]],
    num_nodes: int,
    num_gpus: int,
    *,
    local: bool,
) -> tuple[dict[str, tuple[int, ...]], list[Finding]]:
    findings = []
    if num_nodes > len(pool) and pool:
        findings.append(_too_few_nodes(len(pool), num_nodes, local=local))
    if num_nodes > 0:
        chosen = dict(list(chosen.items())[:num_nodes])
    if num_gpus > 0:
        short = [pool[name] for name in chosen if 0 < pool[name].slots < num_gpus]
        # Here the number of devices is a guess of ours, and deepspeed takes the user's word.
        if short and not local:
            findings.append(_too_many_gpus(short, num_gpus))
        chosen = {name: tuple(range(num_gpus)) if pool[name].slots else () for name in chosen}
    return chosen, findings


def _too_few_nodes(count: int, num_nodes: int, *, local: bool) -> Finding:
    return Finding(
        code="select.too_few_nodes",
        severity=Severity.ERROR,
        observed=f"--num_nodes {num_nodes}, but there is no hostfile and so this machine alone"
        if local
        else f"--num_nodes {num_nodes}, but the number of hosts is {count}",
        why="deepspeed would train on fewer nodes than asked for, with another world size",
        fix="--hostfile FILE, a file that names the nodes" if local else f"--num_nodes {count}",
    )


def _too_many_gpus(short: Sequence[Host], num_gpus: int) -> Finding:
    fewest = min(host.slots for host in short)
    return Finding(
        code="select.too_many_gpus",
        severity=Severity.ERROR,
        observed=f"--num_gpus {num_gpus}, but {fold(host.name for host in short)} has "
        + (f"slots={fewest}" if all(host.slots == fewest for host in short) else "fewer slots"),
        why="deepspeed would start ranks on devices that the hostfile does not give, which fail late with an"
        " invalid device while the others wait",
        fix=f"--num_gpus {fewest}, or slots={num_gpus} in the hostfile if the devices are there",
        hosts=tuple(host.name for host in short),
        where=short[0].where,
    )


def _no_such_slot(subject: str, number: int, host: Host, where: Where) -> Finding:
    has = _runs(range(host.slots)) or "none"
    return Finding(
        code="select.no_such_slot",
        severity=Severity.ERROR,
        observed=f"{subject} slot {number} of {show(host.name)}, which has slots {has}",
        why="a rank there would get a device that is not the job's, or none",
        fix=f"a slot of {has}"
        + (f", or more slots for {show(host.name)} in the hostfile" if host.where else ""),
        hosts=(host.name,),
        where=where,
    )


def _unknown(
    option: str, text: str, mentions: Sequence[filters.Mention], pool: Mapping[str, Host], local: bool
) -> Iterator[Finding]:
    there = f"one of {show(fold(pool), 200)}" if mentions else ""
    for index, mention in enumerate(mentions):
        # Looking for what is alike takes time, and after some names the user has seen the point.
        near = nearest(mention.host, pool) if index < _NEAREST_SHOWN else []
        observed, fix = f"{option} names {show(mention.host)}, which is not in the hostfile", there
        if local:
            observed = f"{option} names {show(mention.host)}, but there is no hostfile and so localhost alone"
            fix = "--hostfile FILE, a file that names this host"
        elif near:
            observed += f"; nearest: {', '.join(near)}"
            end = mention.offset + len(mention.host)
            fix = f"{option} {quoted(text[: mention.offset] + near[0] + text[end:])}"
        yield Finding(
            code="select.unknown_host",
            severity=Severity.ERROR,
            observed=observed,
            why="a filter chooses among the hosts there are, by their names as written there",
            fix=fix,
            where=Where(option, 1, mention.offset + 1),
        )


def _nothing_left(include: str, exclude: str) -> Finding:
    option, text = ("--include", include) if include else ("--exclude", exclude)
    return Finding(
        code="select.empty",
        severity=Severity.ERROR,
        observed=f"{option} {show(text)} leaves no slot of any host",
        why="there is nowhere to start a rank; deepspeed ends with a bare IndexError",
        fix=f"leave out {option}, or name fewer hosts" if exclude else f"leave out {option}",
        where=Where(option, 1, 1),
    )


def _visible_here(value: str, host: Host) -> tuple[dict[str, tuple[int, ...]], list[Finding]]:
    """Take CUDA_VISIBLE_DEVICES as `--include localhost:<value>`, as deepspeed does without a hostfile."""
    everything = {host.name: tuple(range(host.slots))}
    parsed = filters.parse_piece(0, f"{host.name}:{value}", {host.name: host})
    shift = len(host.name)
    if isinstance(parsed, filters.Fault):
        finding = Finding(
            code="select.visible_devices",
            severity=Severity.ERROR,
            observed=f"{VISIBLE}={show(value)} is not a list of device numbers",
            why="the node launcher can only hand out numbers and writes its own over this value, so ranks"
            " would get devices that are not yours; deepspeed stops with a bare ValueError",
            fix=f"{VISIBLE}=0,1 with the numbers that `nvidia-smi -L` shows, or unset {VISIBLE}",
            where=Where(VISIBLE, 1, max(parsed.offset - shift, 1)),
        )
        return everything, [finding]
    findings = [
        _no_such_slot(f"{VISIBLE}={show(value)} names", number, host, Where(VISIBLE, 1, offset - shift))
        for number, offset in parsed.slots or ()
        if not 0 <= number < host.slots
    ]
    return _apply("--include", [parsed], everything), findings


def _visible_ignored(
    value: str | None, chosen: Mapping[str, tuple[int, ...]], *, local: bool, filtered: bool
) -> Iterator[Finding]:
    """Say that CUDA_VISIBLE_DEVICES has no effect, where it names other devices than the ranks will get."""
    if value is None or (not value and not local):
        return
    parsed = filters.parse_piece(0, f"localhost:{value}", ["localhost"])
    numbers = set() if isinstance(parsed, filters.Fault) else {number for number, _ in parsed.slots or ()}
    used = {slot for slots in chosen.values() for slot in slots}
    if used <= numbers:
        return
    winner = "the options that choose devices" if filtered else "the slots of the hostfile"
    yield Finding(
        code="select.visible_devices",
        severity=Severity.WARNING,
        observed=f"{VISIBLE}={show(value)} is set, but ranks will get devices {_runs(sorted(used))}"
        if value
        else f"{VISIBLE} is set and empty, but ranks will get devices {_runs(sorted(used))}",
        why=f"{winner} win: the node launcher writes its own value on every node, as with deepspeed"
        if value or filtered
        else "deepspeed takes the empty value for none: all devices are used",
        fix=f"unset {VISIBLE}, and choose by --include"
        if value
        else f"unset {VISIBLE}, or DS_ACCELERATOR=cpu",
    )


def _loopback(nodes: Sequence[Node]) -> Iterator[Finding]:
    looped = [node for node in nodes if is_loopback(node.name)]
    if not looped or len(nodes) == 1:
        return
    distinct = {
        address if (address := machine(node.name)).startswith("127.") else "127.0.0.1" for node in looped
    }
    # Several loopback addresses and nothing else are one machine, where they mean the same to everyone.
    one_machine = len(distinct) == len(looped) == len(nodes)
    yield Finding(
        code="hostfile.loopback",
        severity=Severity.WARNING if one_machine else Severity.ERROR,
        observed=f"{fold(node.name for node in looped)} among {len(nodes)} hosts",
        why="all these hosts are this one machine, and their ranks take the same devices"
        if one_machine
        else "it means another machine on each node, so the nodes will not find each other",
        fix=f"{fold([looped[0].name])} -> the name that `hostname -f` prints on that machine",
        hosts=tuple(node.name for node in looped),
        where=looped[0].where,
    )


def _uneven(nodes: Sequence[Node], *, filtered: bool) -> Iterator[Finding]:
    counts = {len(node.slots) for node in nodes}
    if len(counts) < 2:
        return
    rotated = [node.name for node in nodes if node.first_rank % len(node.slots)]
    why = "collectives wait for the slowest, and code that takes every node for equal goes wrong"
    if rotated:
        why += f"; LOCAL_RANK is the rank modulo the slots, so on {fold(rotated)} it does not begin with 0"
    yield Finding(
        code="hostfile.uneven",
        severity=Severity.WARNING,
        observed="hosts have different numbers of slots\n" + "\n".join(rank_map(nodes)),
        why=why,
        fix="nothing if it is meant so, else "
        + ("the same number of slots of each host" if filtered else f"--num_gpus {min(counts)}"),
        hosts=tuple(node.name for node in nodes),
        where=nodes[0].where,
    )
