"""Batch arithmetic: train batch = micro batch x accumulation steps x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safelaunch.ds_rules.arguments import parallel_sizes
from safelaunch.ds_rules.view import MISSING, View, is_placeholder, shown
from safelaunch.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAIN, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_UNKNOWN = object()
_LARGEST = 10**12
"""No batch is larger; DeepSpeed sets no limit."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch sizes as given; None where absent, so that DeepSpeed derives them."""

    train: int | None
    micro: int | None
    steps: int | None

    def filled(self, ranks: int) -> tuple[int, int, int]:
        """Return train batch, micro batch and steps as DeepSpeed derives them, by its own rounding."""
        train, micro, steps = self.train, self.micro, self.steps
        if train is None:
            steps = 1 if steps is None else steps
            return (micro or 0) * steps * ranks, micro or 0, steps
        if micro is not None:
            return train, micro, (train // micro // ranks if steps is None else steps)
        steps = 1 if steps is None else steps
        return train, train // ranks // steps, steps

    def fits(self, ranks: int) -> bool:
        """Tell whether DeepSpeed accepts the sizes on so many data-parallel ranks."""
        train, micro, steps = self.filled(ranks)
        return min(train, micro, steps) > 0 and train == micro * steps * ranks


def check(view: View) -> tuple[list[Finding], list[str]]:
    """Judge the batch sizes; also returns the keys among them that hold placeholders."""
    if view.is_true("elasticity", "enabled"):
        # Up to 0.19.7 elasticity replaces all three sizes; later it is refused by itself.
        return [], []
    values = {name: _size(view, name) for name in (TRAIN, MICRO, STEPS)}
    placeholders = [name for name in values if is_placeholder(view.get(name), refused=True)]
    wrong = [_wrong_size(view, name) for name, value in values.items() if isinstance(value, str)]
    if wrong or _UNKNOWN in values.values():
        return wrong, placeholders
    batch = Batch(values[TRAIN], values[MICRO], values[STEPS])
    if batch.train is None and batch.micro is None:
        return [_none_given(view)], placeholders
    return _arithmetic(view, batch), placeholders


def _size(view: View, name: str) -> Any:
    """Return a size, None where absent, `_UNKNOWN` where filled in later, or text where it is no size."""
    value = view.known(name)
    if value is MISSING:
        return None if view.get(name) is MISSING else _UNKNOWN
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST):
        return value
    return _UNKNOWN if is_placeholder(value, refused=True) else "wrong"


def _wrong_size(view: View, name: str) -> Finding:
    return view.finding(
        "config.batch",
        Severity.ERROR,
        (name,),
        observed=f'"{name}" is {shown(view.get(name))}',
        why="a batch size is a whole number above 0, written without quotes",
        fix=f'write "{name}": N with a whole number N, or "auto" where the framework fills it in',
    )


def _none_given(view: View) -> Finding:
    return view.finding(
        "config.batch",
        Severity.WARNING,
        (STEPS,),
        observed=f'neither "{TRAIN}" nor "{MICRO}" is given',
        why="DeepSpeed needs one of them and stops, unless your script or framework adds it",
        fix=f'add "{MICRO}": N, or leave it where your framework does so',
    )


def _arithmetic(view: View, batch: Batch) -> list[Finding]:
    world = view.world_size
    if world is None:
        return [] if _fits_some_world(batch) else [_no_world(view, batch)]
    sizes = parallel_sizes(view)
    ranks = [world // size for size in sizes if world % size == 0]
    fitting = [count for count in ranks if batch.fits(count)]
    if not fitting:
        return [_mismatch(view, batch, ranks[-1])]
    if batch.train is None:
        return [_derived(view, batch, fitting[-1])]
    return []


def _fits_some_world(batch: Batch) -> bool:
    if batch.train is None:
        return True
    return batch.train % ((batch.micro or 1) * (batch.steps or 1)) == 0


def _no_world(view: View, batch: Batch) -> Finding:
    unit = (batch.micro or 1) * (batch.steps or 1)
    near = max(unit, (batch.train or 0) // unit * unit)
    return view.finding(
        "config.batch",
        Severity.ERROR,
        (TRAIN,),
        observed=f'"{TRAIN}" {batch.train} is no multiple of {_product(batch)} = {unit}',
        why="no number of ranks makes the train batch out of such micro batches: DeepSpeed stops",
        fix=f'set "{TRAIN}": {near}',
    )


def _product(batch: Batch) -> str:
    parts = []
    if batch.micro is not None:
        parts.append(f"micro batch {batch.micro}")
    if batch.steps is not None:
        parts.append(_count(batch.steps, "accumulation step"))
    return " x ".join(parts)


def _derived(view: View, batch: Batch, ranks: int) -> Finding:
    train, micro, steps = batch.filled(ranks)
    return view.finding(
        "config.batch_derived",
        Severity.INFO,
        (MICRO,),
        observed=f'"{TRAIN}" follows from the number of ranks: {micro} x {steps} x {ranks} = {train}',
        why="with a node or GPU left out the job would train on with another batch size",
        fix=f'add "{TRAIN}": {train} to have DeepSpeed hold it',
    )


def _mismatch(view: View, batch: Batch, ranks: int) -> Finding:
    train, micro, steps = batch.filled(ranks)
    total = micro * steps * ranks
    if min(micro, steps) > 0:
        observed = (
            f'"{TRAIN}" {train} is not micro batch {micro} x {_count(steps, "accumulation step")} x '
            f"{_count(ranks, 'data-parallel rank')} = {total}"
        )
    else:
        parts = _product(batch)
        observed = (
            f'"{TRAIN}" {train} is too small for {parts + " x " if parts else ""}{_count(ranks, "rank")}'
        )
    return view.finding(
        "config.batch",
        Severity.ERROR,
        (TRAIN,),
        observed=observed,
        why="DeepSpeed stops when the three do not agree on the ranks of this plan" + _splitting(view, batch),
        fix="; or ".join(_ways(view, batch, ranks)),
    )


def _splitting(view: View, batch: Batch) -> str:
    """Say where the sizes would fit if the script splits its model over several ranks."""
    world = view.world_size or 1
    fits = next((n for n in _divisors(world) if n < world and batch.fits(n)), None)
    if fits is None:
        return ""
    return (
        f" (they would fit if your script splits each model copy over {world // fits} ranks: then say "
        '"config.batch" = "warning" in [checks] of safelaunch.toml)'
    )


def _ways(view: View, batch: Batch, ranks: int) -> list[str]:
    """Return the changes that make the sum right, each alone."""
    train, micro, steps = batch.filled(ranks)
    ways = []
    unit = (batch.micro or 1) * (batch.steps or 1) * ranks
    near = max(unit, train // unit * unit)
    ways.append(f'set "{TRAIN}": {unit if None not in (batch.micro, batch.steps) else near}')
    if batch.steps is not None and train % (max(micro, 1) * ranks) == 0:
        ways.append(f'set "{STEPS}": {train // (max(micro, 1) * ranks)}')
    if batch.micro is not None and train % (max(steps, 1) * ranks) == 0:
        ways.append(f'set "{MICRO}": {train // (max(steps, 1) * ranks)}')
    size = (view.world_size or ranks) // ranks
    fitting = [count for count in _divisors(train) if batch.fits(count)]
    if fitting:
        near = min(fitting, key=lambda count: (abs(count - ranks), count))
        ways.append(f"start {_count(near * size, 'rank')} in place of {ranks * size}")
    return ways


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _divisors(number: int) -> Iterable[int]:
    """Return the divisors of a number, the greatest first; none where it is too large to be a batch."""
    if number > 10**7:
        return []
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)
