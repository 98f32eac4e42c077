"""Keys and values of every block of the config against the tables: unknown, removed, of a wrong type."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safelaunch.ds_rules import kinds, tables
from safelaunch.ds_rules.view import MISSING, View, dotted, is_open, is_placeholder, shown
from safelaunch.findings import Finding, Severity

if TYPE_CHECKING:
    from safelaunch.ds_rules.tables import Block, Key
    from safelaunch.located import KeyPath

_REPLACEMENTS = {
    "amp": 'use "bf16": {"enabled": true}, "fp16": {"enabled": true} or "torch_autocast"',
    "curriculum_learning": 'move it to "data_efficiency": {"data_sampling": {"curriculum_learning": ...}}',
    "elasticity": "remove it and set the batch sizes for the number of ranks you start",
    "nebula": "remove it: checkpoints are written by torch.save",
    "seq_parallel_comm_data_type": 'rename it to "seq_parallel_communication_data_type"',
    "sparse_gradients": "remove it: embeddings made with sparse=True need no setting",
    "thread_count": 'rename it to "intra_op_parallelism"',
    "zeropp_loco_param": "remove it: quantised gradients work without it",
}


@dataclass(slots=True)
class Result:
    """What a walk over the blocks found: findings, and the paths whose values something else fills in."""

    findings: list[Finding] = field(default_factory=list)
    automatic: list[KeyPath] = field(default_factory=list)
    placeholders: list[KeyPath] = field(default_factory=list)


def check(view: View) -> Result:
    """Judge every key that the tables know of, and name those that they do not know."""
    result = Result()
    _block(view, (), (), view.value, result)
    return result


def _block(
    view: View, table_path: KeyPath, path: KeyPath, value: dict[str, Any] | Any, result: Result
) -> None:
    """Judge one block; `path` differs from `table_path` where the file uses another name for it."""
    block = tables.blocks()[table_path]
    if not isinstance(value, dict):
        finding = _not_an_object(view, block, path, value)
        if finding is not None:
            result.findings.append(finding)
        return
    keys = block.in_version(view.version)
    for name, item in value.items():
        here = (*path, name)
        key = keys.get(name)
        if key is None or key.kind != "{}" or not isinstance(item, dict):
            _gaps(here, item, result)
        if key is None:
            result.findings.extend(_unlisted(view, block, here, item))
        elif is_open(item):
            continue
        elif key.kind == "{}":
            _nested(view, (*table_path, key.name), here, item, result)
        else:
            _value(view, block, key, here, item, result)
    result.findings.extend(_said_twice(view, block, path, value, keys))


def _gaps(path: KeyPath, value: Any, result: Result) -> None:
    """Note what is left for others to fill in, also deep in parts that DeepSpeed hands on as they are."""
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, name), item) for name, item in reversed(value.items())]
        elif value == "auto":
            result.automatic.append(path)
        elif is_placeholder(value, refused=False):
            result.placeholders.append(path)


def _nested(view: View, table_path: KeyPath, path: KeyPath, item: Any, result: Result) -> None:
    if table_path == ("bfloat16",):
        # An old name of bf16, looked at only where that is not given.
        if view.get("bf16") not in (MISSING, None):
            return
        table_path = ("bf16",)
    _block(view, table_path, path, item, result)


def _not_an_object(view: View, block: Block, path: KeyPath, value: Any) -> Finding | None:
    if value is None and block.optional and _null_is_absent(view, path):
        return None
    if path == ("expert_parallel",) and not value:
        return None
    if path == ("zero_optimization",) and isinstance(value, bool):
        return view.finding(
            "config.zero",
            Severity.WARNING,
            path,
            observed=f'"zero_optimization": {shown(value)} is the form of old releases',
            why="DeepSpeed takes true for stage 1 and ignores every other ZeRO setting",
            fix=f'write "zero_optimization": {{"stage": {int(value)}}}',
        )
    stops = _is_read(view, path, value)
    return view.finding(
        _code(path),
        Severity.ERROR if stops else Severity.WARNING,
        path,
        observed=f'"{dotted(path)}" is {shown(value)}',
        why="DeepSpeed needs an object here" + (" and stops" if stops else ""),
        fix=f'write "{dotted(path[-1:])}": {{...}}, or remove it',
    )


def _null_is_absent(view: View, path: KeyPath) -> bool:
    """Tell whether null stands for absent in a block that is optional by its table: bf16 differs."""
    return path != ("bfloat16",) and (path != ("bf16",) or view.version >= (0, 17, 1))


def _is_read(view: View, path: KeyPath, value: Any) -> bool:
    """Tell whether DeepSpeed reads a part of the config with the rest, so that it stops at a wrong value."""
    if path == ("timers",):
        return not isinstance(value, (str, list))
    if path[:2] == ("optimizer", "params"):
        return isinstance(view.get("optimizer", "type"), str)
    return path != ("scheduler", "params")


def _value(view: View, block: Block, key: Key, path: KeyPath, item: Any, result: Result) -> None:
    refuses = block.refuses(view.version)
    mode: kinds.Mode = "as written"
    if refuses:
        mode = "pydantic 2" if view.version >= tables.PYDANTIC_2 else "pydantic 1"
    problem = kinds.fault(key, item, mode)
    if problem is None:
        return
    if is_placeholder(item, refused=True):
        result.placeholders.append(path)
        return
    stops = refuses or (key.refused and _is_read(view, path, item))
    finding = view.finding(
        _code(path),
        Severity.ERROR if stops else Severity.WARNING,
        path,
        observed=f'"{dotted(path)}" is {shown(item)}',
        why=f"it {problem}; "
        + (
            "DeepSpeed stops at it"
            if stops
            else "DeepSpeed takes it as it is, and fails or misreads it later"
        ),
        fix=f'change "{dotted(path[-1:])}": it {problem}',
    )
    result.findings.append(finding)


def _unlisted(view: View, block: Block, path: KeyPath, item: Any) -> list[Finding]:
    """Return a finding about a key that this release does not have in this block, if it deserves one."""
    others = [key for key in block.keys if path[-1] in key.names]
    dropped = [key for key in others if key.until is not None and key.until < view.version]
    coming = [key.since for key in others if key.since is not None and key.since > view.version]
    if dropped and not coming:
        return [_removed(view, block, path, dropped[-1])]
    if block.is_open or (not block.refuses(view.version) and _is_note(path[-1])):
        return []
    # A model of DeepSpeed drops "auto" values before it looks at the names.
    stops = block.refuses(view.version) and not view.newer and item != "auto"
    name = dotted(path)
    release = tables.show(view.version)
    near = _nearest(path[-1], block.in_version(view.version))
    if coming:
        observed = f'"{name}" exists from DeepSpeed {tables.show(min(coming))} on'
        fix = f'remove "{name}", or install deepspeed>={tables.show(min(coming))} on every node'
    else:
        observed = f'"{name}" is no key of DeepSpeed {release}'
        fix = f'rename it to "{near}" if you mean that, or remove it' if near else f'remove "{name}"'
    return [
        view.finding(
            "config.unknown_key",
            Severity.ERROR if stops else Severity.WARNING,
            path,
            observed=observed,
            why="DeepSpeed refuses unknown keys in this block" if stops else "DeepSpeed ignores it silently",
            fix=fix,
        )
    ]


def _is_note(name: str) -> bool:
    """Tell whether a key is somebody's note to himself: `_comment`, `//`, `#`."""
    plain = name.lstrip("/#")
    return not plain or plain.startswith(("_", "comment"))


def _removed(view: View, block: Block, path: KeyPath, key: Key) -> Finding:
    stops = key.gone_refused or block.refuses(view.version)
    last = tables.show(key.until or tables.NEWEST)
    return view.finding(
        "config.elastic" if path == ("elasticity",) else "config.removed_key",
        Severity.ERROR if stops else Severity.WARNING,
        path,
        observed=f'"{dotted(path)}" is gone: DeepSpeed {last} was the last release with it',
        why=f"DeepSpeed {tables.show(view.version)} "
        + ("stops at it" if stops else "ignores it silently, so its setting has no effect"),
        fix=f"{_REPLACEMENTS.get(path[-1], 'remove it')}, or install deepspeed<={last} on every node",
    )


def _said_twice(
    view: View, block: Block, path: KeyPath, value: dict[str, Any], keys: dict[str, Key]
) -> list[Finding]:
    """Find keys given by both their names, and old names given beside the new one; DeepSpeed refuses both."""
    if not block.refuses(view.version):
        return []
    given = [name for name, item in value.items() if name in keys and item != "auto"]
    findings = []
    for key in {keys[name].name: keys[name] for name in given}.values():
        others = [*key.names] if key.replaced is None else [*key.names, *keys[key.replaced].names]
        used = [name for name in given if name in others]
        if len(used) > 1:
            findings.append(
                view.finding(
                    _code((*path, used[-1])),
                    Severity.ERROR,
                    (*path, used[-1]),
                    observed=f'"{used[0]}" and "{used[1]}" are two names of one setting',
                    why="DeepSpeed refuses both together",
                    fix=f'keep "{(keys[key.replaced] if key.replaced else key).name}" and remove the other',
                )
            )
    return findings


def _nearest(name: str, names: dict[str, Key]) -> str | None:
    plain = name.replace("-", "_").lower()
    if plain in names:
        return plain
    return next(iter(difflib.get_close_matches(plain, names, n=1, cutoff=0.75)), None)


def _code(path: KeyPath) -> str:
    """Return the code under which a wrong value is reported."""
    if path[0] in ("fp16", "bf16", "bfloat16"):
        return "config.precision"
    if path[0] != "zero_optimization":
        return "config.value"
    return "config.offload" if len(path) > 1 and path[1].startswith("offload_") else "config.zero"
