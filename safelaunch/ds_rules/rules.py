"""Rules over several keys: precision, ZeRO, offload, optimizer and scheduler names.

Read off `DeepSpeedConfig._initialize_params` and `_do_error_check`, the models' validators, and what the
engine does with a config that could be read.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from safelaunch.ds_rules import kinds, tables
from safelaunch.ds_rules.view import MISSING, View, dotted, is_open, is_placeholder, shown
from safelaunch.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

ZERO = "zero_optimization"
_PRECISION_MODELS = (0, 17, 1)
_MASTER_WEIGHTS_IN_ALL_STAGES = (0, 18, 3)
_LOSS_SCALE_LIMITS = (0, 19, 3)
_ALLREDUCE_OP = (0, 19, 6)
_GRAD_NORM_SWITCH = (0, 19, 7)
_NO_ONEBIT = (0, 19, 7)
_MUON = (0, 17, 6)

_DEEPSPEED_OPTIMIZERS = {
    *("Adagrad", "Adam", "AdamW", "Lamb", "MuAdam", "MuAdamW", "MuSGD", "Lion"),
}
_ONEBIT_OPTIMIZERS = {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"}
_TORCH_OPTIMIZERS = {
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
}
_SCHEDULERS = {
    *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
    *("ExponentialLR", "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR"),
}


def check(view: View) -> list[Finding]:
    """Apply every rule."""
    rules = (_precision, _master_weights, _loss_scale, _zero, _reduce_op, _offload, _names, _data_efficiency)
    return [finding for rule in rules for finding in rule(view)]


def _error(view: View, code: str, path: tuple[str, ...], observed: str, why: str, fix: str) -> Finding:
    return view.finding(code, Severity.ERROR, path, observed=observed, why=why, fix=fix)


def _warning(view: View, code: str, path: tuple[str, ...], observed: str, why: str, fix: str) -> Finding:
    return view.finding(code, Severity.WARNING, path, observed=observed, why=why, fix=fix)


def _enabled(view: View, block: str) -> bool:
    """Tell whether fp16 or bf16 is on; before they were models, any non-empty text was taken for true."""
    if view.version >= _PRECISION_MODELS:
        return view.is_on(block, "enabled")
    return view.is_true(block, "enabled") and not is_placeholder(view.get(block, "enabled"), refused=True)


def _bf16(view: View) -> str:
    return "bfloat16" if view.get("bf16") in (MISSING, None) else "bf16"


def _precision(view: View) -> Iterator[Finding]:
    bf16 = _bf16(view)
    if _enabled(view, "fp16") and _enabled(view, bf16):
        yield _error(
            view,
            "config.precision",
            (bf16, "enabled"),
            f'"fp16.enabled" and "{bf16}.enabled" are both true',
            "a model trains in one of them; DeepSpeed stops",
            f'set "enabled": false in "fp16" or in "{bf16}"',
        )


def _master_weights(view: View) -> Iterator[Finding]:
    """Judge the settings that keep master weights in 16 bits, which need ZeRO."""
    stage = view.stage()
    wide = view.version >= _MASTER_WEIGHTS_IN_ALL_STAGES
    stages = (1, 2, 3) if wide else (2,)
    paths = [("fp16", "fp16_master_weights_and_grads")]
    if wide:
        paths += [("bf16", "bf16_master_weights_and_grads"), ("bf16", "bf16_optimizer_states")]
    if view.version < _PRECISION_MODELS and not _enabled(view, "fp16"):
        return
    for path in paths:
        if view.is_on(*path) and stage is not None and stage not in stages:
            yield _error(
                view,
                "config.precision",
                path,
                f'"{dotted(path)}" is on with ZeRO stage {stage}',
                f"DeepSpeed {tables.show(view.version)} stops: it needs stage {', '.join(map(str, stages))}",
                f'set "{path[1]}": false, or "{ZERO}": {{"stage": 2}}',
            )
    states, master = ("bf16", "bf16_optimizer_states"), ("bf16", "bf16_master_weights_and_grads")
    if wide and view.is_on(*states) and not (view.is_on(*master) or is_open(view.get(*master))):
        yield _error(
            view,
            "config.precision",
            states,
            f'"{states[1]}" is on without "{master[1]}"',
            "DeepSpeed needs the second for the first and stops",
            f'add "{master[1]}": true',
        )


def _loss_scale(view: View) -> Iterator[Finding]:
    """Judge the limits of dynamic loss scaling."""
    scale = view.get("fp16", "loss_scale")
    if view.version < _LOSS_SCALE_LIMITS or not _enabled(view, "fp16"):
        return
    if scale is not MISSING and scale != "auto" and kinds.as_float(scale) != 0:
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = kinds.as_float(view.known("fp16", name))
        if value is not None and value <= 0:
            yield _error(
                view,
                "config.precision",
                ("fp16", name),
                f'"fp16.{name}" is {shown(view.get("fp16", name))} with dynamic loss scaling',
                "the loss scale would collapse or be divided by zero; DeepSpeed stops",
                f'set "{name}" to 1 or more, or a fixed "loss_scale" above 0',
            )


def _zero(view: View) -> Iterator[Finding]:
    stage = view.stage()
    if stage is None:
        return
    ratio = kinds.as_float(view.known(ZERO, "offload_optimizer", "ratio"))
    if view.version >= tables.PYDANTIC_2 and ratio is not None and 0 <= ratio < 1 and stage != 3:
        yield _error(
            view,
            "config.offload",
            (ZERO, "offload_optimizer", "ratio"),
            f'"offload_optimizer.ratio" is {ratio:g} with ZeRO stage {stage}',
            "a part of the optimizer can be offloaded with stage 3 only; DeepSpeed stops",
            'remove "ratio", or set "stage": 3',
        )
    norm = view.known(ZERO, "compute_grad_norm")
    if view.version >= _GRAD_NORM_SWITCH and kinds.as_bool(norm) is False and stage not in (1, 2):
        yield _error(
            view,
            "config.zero",
            (ZERO, "compute_grad_norm"),
            f'"compute_grad_norm" is false with ZeRO stage {stage}',
            "DeepSpeed can leave the norm out with stage 1 or 2 only, and stops",
            'remove "compute_grad_norm", or set "stage": 1 or 2',
        )


def _reduce_op(view: View) -> Iterator[Finding]:
    operation = view.known("gradient_allreduce_op")
    if view.version < _ALLREDUCE_OP or not isinstance(operation, str) or operation.lower() != "sum":
        return
    against = []
    if view.stage() == 3:
        against.append("ZeRO stage 3")
    if isinstance(view.known(ZERO, "zenflow"), dict):
        against.append("ZenFlow")
    if view.is_on("compile", "deepcompile"):
        against.append("DeepCompile")
    if against:
        yield _error(
            view,
            "config.zero",
            ("gradient_allreduce_op",),
            f'"gradient_allreduce_op" is "sum" with {" and ".join(against)}',
            "DeepSpeed does not support that and stops",
            'set "gradient_allreduce_op": "mean", or remove it',
        )


def _offload(view: View) -> Iterator[Finding]:
    stage = view.stage()
    for name, needed in (("offload_param", (3,)), ("offload_optimizer", (1, 2, 3))):
        path = (ZERO, name)
        device = view.known(*path, "device")
        if device not in ("cpu", "nvme") or stage is None:
            continue
        if stage not in needed:
            yield _warning(
                view,
                "config.offload",
                (*path, "device"),
                f'"{name}" is set with ZeRO stage {stage}',
                f"DeepSpeed ignores it below stage {needed[0]}: nothing is offloaded",
                f'set "stage": {needed[0]}, or remove "{name}"',
            )
        elif device == "nvme" and stage != 3:
            yield _warning(
                view,
                "config.offload",
                (*path, "device"),
                f'"{name}.device" is "nvme" with ZeRO stage {stage}',
                "only stage 3 writes to NVMe: the data goes to CPU memory",
                'set "device": "cpu", or "stage": 3',
            )
        elif device == "nvme" and view.get(*path, "nvme_path") in (MISSING, None, "auto"):
            yield _error(
                view,
                "config.offload",
                (*path, "device"),
                f'"{name}.device" is "nvme" without an "nvme_path"',
                "DeepSpeed has no directory to write to and fails when the optimizer or model is built",
                'add "nvme_path": "/path/on/a/local/disk"',
            )


def _names(view: View) -> Iterator[Finding]:
    """Judge optimizer and scheduler names: the engine looks them up unless the script brings its own."""
    optimizer = view.known("optimizer", "type")
    if isinstance(optimizer, str):
        yield from _optimizer(view, optimizer)
    scheduler = view.known("scheduler", "type")
    if isinstance(scheduler, str) and scheduler not in _SCHEDULERS:
        yield _unknown_name(view, ("scheduler", "type"), scheduler, _SCHEDULERS)


def _optimizer(view: View, name: str) -> Iterator[Finding]:
    own = _DEEPSPEED_OPTIMIZERS | ({"Muon"} if view.version >= _MUON else set())
    if view.version < _NO_ONEBIT:
        own |= _ONEBIT_OPTIMIZERS
    if name.lower() in {known.lower() for known in own} or name in _TORCH_OPTIMIZERS:
        return
    if name.lower() in {known.lower() for known in _ONEBIT_OPTIMIZERS}:
        yield _warning(
            view,
            "config.removed_key",
            ("optimizer", "type"),
            f'"optimizer.type" {shown(name)} is gone: DeepSpeed 0.19.6 was the last release with it',
            "DeepSpeed stops at it unless your script hands over an optimizer of its own",
            'use "type": "Adam" or "Lamb", or install deepspeed<=0.19.6 on every node',
        )
    else:
        yield _unknown_name(view, ("optimizer", "type"), name, own | _TORCH_OPTIMIZERS)


def _unknown_name(view: View, path: tuple[str, str], name: str, known: set[str]) -> Finding:
    lowered = {word.lower(): word for word in sorted(known)}
    near = next(iter(difflib.get_close_matches(name.lower(), lowered, n=1)), None)
    return _warning(
        view,
        "config.value",
        path,
        f'"{dotted(path)}" is {shown(name)}, which neither DeepSpeed nor PyTorch has',
        f"DeepSpeed stops at it unless your script hands over {path[0]} objects of its own",
        f'write "type": "{lowered[near]}"' if near else f"write the name of a known {path[0]}",
    )


def _data_efficiency(view: View) -> Iterator[Finding]:
    base = ("data_efficiency", "data_sampling")
    for block, key in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        if block not in tables.blocks()[base].in_version(view.version):
            continue
        path = (*base, block)
        if view.is_true(*path, "enabled") and view.get(*path, key) is MISSING:
            yield _error(
                view,
                "config.value",
                (*path, "enabled"),
                f'"{dotted(path)}" is on without "{key}"',
                "DeepSpeed needs it there and stops",
                f'add "{key}", or set "enabled": false',
            )
