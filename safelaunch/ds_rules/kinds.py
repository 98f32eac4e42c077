"""Kinds of values in DeepSpeed's config, and what each DeepSpeed takes for one.

Blocks that are pydantic models in DeepSpeed are judged by pydantic itself (`"2"` is a whole number there,
`2.5` is none); elsewhere nothing converts a value, so it has to be of its type as it stands.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from safelaunch.ds_rules.tables import Key

Mode = Literal["pydantic 1", "pydantic 2", "as written"]


class Stage(int, Enum):
    """ZeRO stages, as an enumeration since pydantic converts for one differently than for a range."""

    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be, in words, and either the pydantic type or a test that decides."""

    words: str
    type: Any = None
    test: Callable[[Any], bool] | None = None


def _text_in(*allowed: str) -> Callable[[Any], bool]:
    """Test for text that is one of some words when its case is ignored."""
    return lambda value: isinstance(value, str) and value.lower() in allowed


def _is_loss_scale(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return False
    return math.isfinite(number) and number >= 0


def _is_plain_int(value: Any) -> bool:
    """Tell what `fp16.loss_scale_window` takes: no boolean, no text with a fraction."""
    if isinstance(value, bool):
        return False
    try:
        int(value)
    except (OverflowError, TypeError, ValueError):
        return False
    return _converted(int, value) is not _REFUSED


def _is_interval(value: Any) -> bool:
    return value == "auto" if isinstance(value, str) else _converted(int, value) is not _REFUSED


def _holds_text_only(value: Any) -> bool:
    """Tell whether going through a value meets text only; DeepSpeed takes whatever can be gone through."""
    return isinstance(value, (str, list, dict)) and all(isinstance(item, str) for item in value)


def _is_name_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_TORCH_TYPES = {
    *("torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float"),
    *("torch.int8", "int8", "torch.bfloat16", "bf16", "bfloat16"),
}

KINDS: dict[str, Kind] = {
    "any": Kind("anything", test=lambda _: True),
    "bool": Kind("true or false", bool),
    "int": Kind("a whole number", int),
    "float": Kind("a number", float),
    "str": Kind("text", str),
    "path": Kind("a path", Path),
    "dict": Kind("an object", dict[str, Any]),
    "list": Kind("a list", list[Any]),
    "words": Kind("a list of names", list[str] | str),
    "names": Kind("a list of names", test=_holds_text_only),
    "stage": Kind("0, 1, 2 or 3", Stage),
    "interval": Kind('a whole number or "auto"', test=_is_interval),
    "loss_scale": Kind("a number of at least 0 (0 scales by itself)", test=_is_loss_scale),
    "plain_int": Kind("a whole number", test=_is_plain_int),
    # `a | b` with a boolean: DeepSpeed joins wall_clock_breakdown and flops_profiler.enabled so.
    "flag": Kind("true or false", test=lambda value: isinstance(value, int)),
    "comparable": Kind("a number", test=lambda value: isinstance(value, (int, float))),
    "countable": Kind("a whole number", test=lambda value: not value or isinstance(value, (int, float))),
    "true_false": Kind("true or false", test=lambda value: value in (True, False)),
    "filled": Kind("not empty", test=bool),
    "data_type": Kind(
        '"fp16", "bf16", "fp32" or null',
        test=lambda value: value is None or _text_in("fp16", "bf16", "fp32")(value),
    ),
    "torch_type": Kind(
        '"fp16", "bf16" or "fp32"', test=lambda value: isinstance(value, str) and value in _TORCH_TYPES
    ),
    "reduce_op": Kind('"mean" or "sum"', test=_text_in("mean", "sum")),
    "tag_mode": Kind('"Ignore", "Warn" or "Fail"', test=_text_in("ignore", "warn", "fail")),
    "writer": Kind('"mock", "python" or "fast"', test=_text_in("mock", "python", "fast")),
    "writers": Kind('"replica", "socket" or "machine"', test=_text_in("replica", "socket", "machine")),
    "name_list": Kind(
        '"auto" or a list of names', test=lambda value: value == "auto" or _is_name_list(value)
    ),
    "never": Kind("left out: no value in a file is right here", test=lambda _: False),
    "nothing": Kind("null or left out", test=lambda value: value is None),
}

_REFUSED = object()


def fault(key: Key, value: Any, mode: Mode) -> str | None:
    """Return what the value would have to be, or None where it is fine.

    "auto" and placeholders are the caller's matter.
    """
    kind = kind_of(key.kind)
    if value is None and key.kind.endswith("?"):
        return None
    if kind.test is not None:
        converted = value if kind.test(value) else _REFUSED
    else:
        converted = _converted(kind.type, value, mode)
    if converted is not _REFUSED and all(_within(converted, bound) for bound in key.bounds):
        return None
    bounds = " and ".join(key.bounds).replace(">=", "at least ").replace("<=", "at most ")
    bounds = bounds.replace(">", "over ").replace("<", "under ")
    return f"must be {kind.words} {bounds}".rstrip()


@functools.cache
def kind_of(name: str) -> Kind:
    """Return a kind by name; `one:a|b` is one of some words, `some:a|b` a list of them; `?` allows null."""
    name = name.rstrip("?")
    form, _, words = name.partition(":")
    if not words:
        return KINDS[name]
    choices = tuple(words.split("|"))
    shown = " or ".join(f'"{choice}"' for choice in choices)
    if form == "some":
        return Kind(f"a list of {shown}", list[Literal[choices]])  # type: ignore[valid-type]
    return Kind(shown, Literal[choices])


def as_bool(value: Any) -> bool | None:
    """Return what a model's boolean field makes of a value, None where it refuses it."""
    converted = _converted(bool, value)
    return converted if isinstance(converted, bool) else None


def as_float(value: Any) -> float | None:
    """Return what a model's number field makes of a value, None where it refuses it."""
    converted = _converted(float, value)
    return converted if isinstance(converted, float) else None


def as_stage(value: Any) -> int | None:
    """Return the ZeRO stage that a model makes of a value, None where it refuses it."""
    converted = _converted(Stage, value)
    return int(converted) if isinstance(converted, Stage) else None


@functools.cache
def _adapter(name_or_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(name_or_type)


def _converted(kind: Any, value: Any, mode: Mode = "pydantic 2") -> Any:
    """Return the value as the type, or `_REFUSED`."""
    if mode == "as written":
        if isinstance(value, float) and value.is_integer() and kind is int:
            return value
        if isinstance(value, bool) and kind in (int, float):
            return _REFUSED
    if mode == "pydantic 1" and kind is Stage and isinstance(value, str):
        return _REFUSED
    try:
        return _adapter(kind).validate_python(value, strict=mode == "as written")
    except ValidationError as error:
        kinds = {detail["type"] for detail in error.errors(include_url=False, include_context=False)}
        if mode == "pydantic 1" and kinds == {"int_from_float"}:
            return int(value)
        if mode == "pydantic 1" and kinds == {"string_type"} and isinstance(value, (int, float)):
            return str(value)
        return _REFUSED


def _within(value: Any, bound: str) -> bool:
    """Tell whether a number keeps to a bound such as `>=0`; what is no number is not bounded."""
    if isinstance(value, str):
        return True
    limit = float(bound.lstrip("<>="))
    if bound.startswith(">="):
        return bool(value >= limit)
    if bound.startswith("<="):
        return bool(value <= limit)
    return bool(value > limit) if bound.startswith(">") else bool(value < limit)
