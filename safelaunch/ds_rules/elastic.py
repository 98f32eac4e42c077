"""Elasticity of DeepSpeed up to 0.19.7: which world sizes an `elasticity` block allows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from safelaunch.ds_rules.view import MISSING, View
from safelaunch.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.ds_rules import tables

LAST_WITH_ELASTICITY: tables.Version = (0, 19, 7)
_LARGE_DROPPED: tables.Version = (0, 19, 6)
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_LARGEST = 10**6
"""Larger batches are not worked out: DeepSpeed's own search would take minutes."""

# Highly composite numbers up to 720720 (OEIS A002182, and what DeepSpeed scales a batch by).
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080),
    *(15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640),
    *(498960, 554400, 665280, 720720),
)


def check(view: View) -> list[Finding]:
    """Judge an enabled elasticity block; on later releases the block itself is refused (see `blocks`)."""
    if view.version > LAST_WITH_ELASTICITY or not view.is_true("elasticity", "enabled"):
        return []
    problem = _wrong(view)
    if problem is not None:
        return [_finding(view, *problem)]
    if view.world_size is None:
        return []
    block = view.get("elasticity")
    if block.get("version", 0.2) != 0.1 or block["max_train_batch_size"] > _LARGEST:
        return [
            view.finding(
                "config.elastic",
                Severity.NOT_CHECKED,
                ("elasticity",),
                observed="the world sizes of this elasticity block were not worked out",
                why='only "version": 0.1 with a train batch up to a million is worked out here',
                fix='add "version": 0.1 to "elasticity" if that is what you mean',
            )
        ]
    allowed = world_sizes(
        block["micro_batch_sizes"],
        block["max_train_batch_size"],
        (block.get("min_gpus", 1), block.get("max_gpus", 10000)),
        prefer_larger=bool(block.get("prefer_larger_batch", True)),
        keep_large=view.version < _LARGE_DROPPED,
    )
    if view.world_size in allowed:
        return []
    near = max((n for n in allowed if n < view.world_size), default=min(allowed, default=1))
    return [
        _finding(
            view,
            ("elasticity",),
            f"{view.world_size} ranks are none of the world sizes that this elasticity block allows: "
            + _some(allowed),
            f'start {near} ranks, or change "micro_batch_sizes" and "max_train_batch_size"',
        )
    ]


def _finding(view: View, path: tuple[str, ...], observed: str, fix: str) -> Finding:
    return view.finding(
        "config.elastic", Severity.ERROR, path, observed=observed, why="DeepSpeed stops at it", fix=fix
    )


def _wrong(view: View) -> tuple[tuple[str, ...], str, str] | None:
    """Return what is wrong with the block itself: the path, what was observed, and the fix."""
    block = view.get("elasticity")
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in block:
            return ("elasticity",), f'"elasticity" has no "{name}"', f'add "{name}" to "elasticity"'
    sizes, largest = block["micro_batch_sizes"], block["max_train_batch_size"]
    if not isinstance(sizes, list) or not sizes or not all(_is_count(size) for size in sizes):
        path = ("elasticity", "micro_batch_sizes")
        return path, '"micro_batch_sizes" is no list of whole numbers', 'write "micro_batch_sizes": [2, 4]'
    if not _is_count(largest) or largest < max(sizes):
        path = ("elasticity", "max_train_batch_size")
        return path, '"max_train_batch_size" is below a micro batch', f"set it to {max(sizes)} or more"
    least, most = block.get("min_gpus", 1), block.get("max_gpus", 10000)
    if not _is_count(least) or not _is_count(most) or most < least:
        path = ("elasticity", "max_gpus" if "max_gpus" in block else "min_gpus")
        return path, '"min_gpus" and "max_gpus" are no range', 'set "min_gpus" to 1 or more, "max_gpus" above'
    if not block.get("ignore_non_elastic_batch_info", False):
        for name in _BATCH_KEYS:
            if view.get(name) is not MISSING:
                fix = f'remove "{name}", or add "ignore_non_elastic_batch_info": true to "elasticity"'
                return (name,), f'"{name}" is given beside an enabled elasticity block', fix
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12


def _some(sizes: Sequence[int]) -> str:
    if len(sizes) <= 12:
        return ", ".join(map(str, sizes)) or "none"
    return ", ".join(map(str, sizes[:10])) + f", ... {sizes[-1]}"


def world_sizes(
    micro_batches: Sequence[int],
    largest: int,
    limits: tuple[int, int],
    *,
    prefer_larger: bool,
    keep_large: bool = False,
) -> list[int]:
    """Return the world sizes of elasticity 0.1: those of the batch size that the most world sizes divide.

    Candidates are each micro batch and their least common multiple, scaled up to `largest` by a highly
    composite number; `limits` are the least and the greatest world size. `keep_large`: a multiple over
    `largest` is a candidate all the same, as it was before 0.19.6.
    """
    best: list[int] = []
    chosen = min(micro_batches)
    for base in {*micro_batches, math.lcm(*micro_batches)}:
        if base > largest and not keep_large:
            continue
        scale = max(number for number in _HIGHLY_COMPOSITE if number <= max(1, largest // base))
        batch = base * scale
        sizes = _dividing(batch, micro_batches, limits)
        better = batch > chosen if prefer_larger else batch < chosen
        if len(sizes) > len(best) or (len(sizes) == len(best) and better):
            best, chosen = sizes, batch
    return best


def _dividing(batch: int, micro_batches: Sequence[int], limits: tuple[int, int]) -> list[int]:
    found = set()
    for micro in micro_batches:
        if batch % micro == 0:
            ranks = batch // micro
            found |= {count for count in range(1, ranks + 1) if ranks % count == 0}
    return sorted(count for count in found if limits[0] <= count <= limits[1])
