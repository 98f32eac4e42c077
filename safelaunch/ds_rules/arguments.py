"""The script's own command line against the config: the same thing said differently."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from safelaunch.ds_rules.view import View, dotted, shown
from safelaunch.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

# Options of the Hugging Face Trainer and of Megatron-DeepSpeed, and common names of the same things.
_SAME: dict[str, tuple[tuple[str, ...], ...]] = {
    "train_batch_size": (("train_batch_size",),),
    "global_batch_size": (("train_batch_size",),),
    "train_micro_batch_size": (("train_micro_batch_size_per_gpu",),),
    "train_micro_batch_size_per_gpu": (("train_micro_batch_size_per_gpu",),),
    "micro_batch_size": (("train_micro_batch_size_per_gpu",),),
    "per_device_train_batch_size": (("train_micro_batch_size_per_gpu",),),
    "per_gpu_train_batch_size": (("train_micro_batch_size_per_gpu",),),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",),),
    "max_grad_norm": (("gradient_clipping",),),
    "clip_grad": (("gradient_clipping",),),
    "gradient_clipping": (("gradient_clipping",),),
    "zero_stage": (("zero_optimization", "stage"),),
    "learning_rate": (("optimizer", "params", "lr"), ("scheduler", "params", "warmup_max_lr")),
    "lr": (("optimizer", "params", "lr"),),
    "weight_decay": (("optimizer", "params", "weight_decay"),),
    "adam_epsilon": (("optimizer", "params", "eps"),),
    "warmup_steps": (("scheduler", "params", "warmup_num_steps"),),
    "max_steps": (("scheduler", "params", "total_num_steps"),),
}
_PRECISIONS = {"bf16": "fp16", "fp16": "bf16"}
_SPLITTING = {
    *("tensor_model_parallel_size", "tensor_parallel_size", "model_parallel_size", "tp_size", "mp_size"),
    *("pipeline_model_parallel_size", "pipeline_parallel_size", "pipe_parallel_size", "pp_size"),
    *("context_parallel_size", "ds_sequence_parallel_size", "sequence_parallel_size", "sp_size"),
}


def check(view: View) -> list[Finding]:
    """Compare the script's arguments with the values of the config that are not "auto"."""
    given = options(view.script_args)
    findings = []
    for name, paths in _SAME.items():
        number = _number(given.get(name))
        for path in paths:
            value = view.known(*path)
            if number is not None and _is_number(value) and not math.isclose(number, value):
                findings.append(_conflict(view, path, f"--{name} {given[name]}"))
    for name, other in _PRECISIONS.items():
        if given.get(name, "false") is None or str(given.get(name)).lower() in ("true", "1"):
            if view.known(name, "enabled") is False:
                findings.append(_conflict(view, (name, "enabled"), f"--{name}"))
            elif view.is_on(other, "enabled"):
                findings.append(_conflict(view, (other, "enabled"), f"--{name}"))
    return findings


def options(args: Sequence[str]) -> dict[str, str | None]:
    """Return a script's long options, names with underscores; None for one that takes no value here."""
    found: dict[str, str | None] = {}
    for index, argument in enumerate(args):
        if not argument.startswith("--") or argument == "--":
            continue
        name, equals, value = argument[2:].partition("=")
        following = args[index + 1] if index + 1 < len(args) else "--"
        if equals:
            found[name.replace("-", "_")] = value
        else:
            found[name.replace("-", "_")] = None if following.startswith("--") else following
    return found


def parallel_sizes(view: View) -> list[int]:
    """Return over how many ranks one model copy may be spread: 1 first, the likeliest last.

    The batch counts data-parallel ranks. DeepSpeed divides by `sequence_parallel_size` of the config itself;
    a script may pass its own layout (`mpu`), which its arguments hint at.
    """
    splits = [int(size) for size in (_number(options(view.script_args).get(n)) for n in _SPLITTING) if size]
    sizes = {1, math.prod(size for size in splits if size > 0)}
    for path in (("sequence_parallel_size",), ("tensor_parallel", "autotp_size")):
        size = view.known(*path)
        if isinstance(size, int) and size > 1:
            sizes.add(size)
    return sorted(sizes)


def _conflict(view: View, path: tuple[str, ...], argument: str) -> Finding:
    value = view.get(*path)
    return view.finding(
        "config.cli_conflict",
        Severity.WARNING,
        path,
        observed=f'"{dotted(path)}" is {shown(value)}, and the script is given {argument}',
        why="only one of them can hold; the Hugging Face Trainer refuses to start, other scripts pick one",
        fix=f'make both equal, or write "{path[-1]}": "auto" if your framework fills it in',
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _number(text: str | None) -> float | None:
    """Return a finite number that an argument says, else None."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
