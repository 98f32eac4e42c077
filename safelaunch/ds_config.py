"""DeepSpeed configs: judged before anything starts, by the rules of the installed DeepSpeed; pure.

DeepSpeed is not imported: what its releases accept is in `ds_rules`, and tests hold that to the real one.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import TYPE_CHECKING, Any

from safelaunch import located
from safelaunch.ds_rules import arguments, batch, blocks, elastic, rules, tables
from safelaunch.ds_rules.view import View, dotted, is_open
from safelaunch.findings import Finding, Severity, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safelaunch.located import KeyPath

_OFFLOADS = ("offload_param", "offload_optimizer")


def check(
    text: bytes,
    file: str,
    *,
    deepspeed_version: str | None,
    world_size: int | None,
    script_args: Sequence[str],
) -> list[Finding]:
    """Return everything that is wrong or worth saying about a config, in the order of the file.

    Args:
        text: the file's content, or what `decode_argument` returned.
        file: the name to show.
        deepspeed_version: of the installed DeepSpeed; None where not known.
        world_size: number of ranks planned; None leaves the batch arithmetic to them unchecked.
        script_args: arguments of the user's script, compared with the config.

    """
    try:
        document = located.read(_decoded(text))
    except located.UnreadableError as error:
        return [_unreadable(file, error, text)]
    if not isinstance(document.value, dict):
        return [_no_object(file)]
    version = tables.version_of(deepspeed_version or "")
    view = View(
        value=document.value,
        places=document.places,
        file=file,
        version=min(max(version or tables.NEWEST, tables.OLDEST), tables.NEWEST),
        newer=version is not None and version > tables.NEWEST,
        world_size=world_size,
        script_args=script_args,
    )
    findings = [_duplicate(file, duplicate) for duplicate in document.duplicates]
    findings += _not_strict_json(view, text)
    if version is None:
        findings.append(_no_version(file))
    walked = blocks.check(view)
    sizes, unfilled_sizes = batch.check(view)
    findings += [*walked.findings, *sizes]
    findings += [*rules.check(view), *elastic.check(view), *arguments.check(view)]
    findings += _open_values(view, walked, unfilled_sizes)
    return sorted(findings, key=_position)


def load(text: bytes) -> Any:
    """Return a config's value as DeepSpeed reads it.

    Raises:
        ValueError: it cannot be read (`located.UnreadableError` says where), or a key is given twice.

    """
    document = located.read(_decoded(text))
    if document.duplicates:
        raise ValueError(f"duplicate key {dotted(document.duplicates[0].path)}")
    return document.value


def decode_argument(arg: str) -> bytes | None:
    """Return the config that a command-line argument holds in URL-safe base64; None where it holds none.

    DeepSpeed tries this with every `--deepspeed_config` that names no file.
    """
    try:
        decoded = base64.b64decode(arg.encode("ascii"), altchars=b"-_", validate=True)
        return decoded if decoded.decode("utf-8").lstrip().startswith("{") else None
    except (binascii.Error, ValueError):
        return None


def offload_paths(config: Any) -> list[str]:
    """Return the directories on NVMe that a config makes DeepSpeed write to, each once."""
    paths: list[str] = []
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    for name in _OFFLOADS:
        block = zero.get(name) if isinstance(zero, dict) else None
        path = block.get("nvme_path") if isinstance(block, dict) and block.get("device") == "nvme" else None
        if isinstance(path, str) and not is_open(path) and path not in paths:
            paths.append(path)
    return paths


def _decoded(text: bytes) -> str:
    """Return the text as Python's text mode reads a file: UTF-8, every line end as a newline."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        before = text[: error.start].decode("utf-8")
        lines = re.split("\r\n|\r|\n", before)
        place = located.Place(len(lines), len(lines[-1]) + 1)
        raise located.UnreadableError("the file is not UTF-8 text", place) from error
    return decoded.replace("\r\n", "\n").replace("\r", "\n")


def _unreadable(file: str, error: located.UnreadableError, text: bytes) -> Finding:
    line = text.replace(b"\r\n", b"\n").splitlines()[error.place.line - 1 : error.place.line]
    shown = json.dumps(line[0].decode("utf-8", "replace").strip()[:80]) if line else "the end of the file"
    return Finding(
        code="config.syntax",
        severity=Severity.ERROR,
        observed=f"{error.reason}: {shown}",
        why="DeepSpeed cannot read the config: every rank would stop",
        fix=f"correct line {error.place.line} or the line before it",
        where=Where(file, error.place.line, error.place.column),
    )


def _no_object(file: str) -> Finding:
    return Finding(
        code="config.syntax",
        severity=Severity.ERROR,
        observed="the file holds no object",
        why="DeepSpeed needs keys and values within { }",
        fix='begin the file with {"train_micro_batch_size_per_gpu": N, ...}',
        where=Where(file, 1, 1),
    )


def _duplicate(file: str, duplicate: located.Duplicate) -> Finding:
    return Finding(
        code="config.duplicate_key",
        severity=Severity.ERROR,
        observed=f'"{dotted(duplicate.path)}" is given on line {duplicate.first.line} and again here',
        why="DeepSpeed refuses a key given twice",
        fix="remove one of the two",
        where=Where(file, duplicate.again.line, duplicate.again.column),
    )


def _not_strict_json(view: View, text: bytes) -> list[Finding]:
    """Say where the file is Hjson but no JSON: DeepSpeed reads it, the Hugging Face libraries do not."""
    try:
        json.loads(_decoded(text))
    except (ValueError, RecursionError) as error:
        line, column = getattr(error, "lineno", 1), getattr(error, "colno", 1)
    else:
        return []
    by_trainer = bool(arguments.options(view.script_args).get("deepspeed"))
    return [
        Finding(
            code="config.syntax",
            severity=Severity.WARNING if by_trainer else Severity.INFO,
            observed="the file is Hjson (comments, unquoted text or spare commas), not JSON",
            why="DeepSpeed reads it; the Hugging Face Trainer and accelerate read JSON only and would stop",
            fix=f"write it as JSON if one of them reads it: first difference in line {line}",
            where=Where(view.file, line, column),
        )
    ]


def _no_version(file: str) -> Finding:
    newest = tables.show(tables.NEWEST)
    return Finding(
        code="config.value",
        severity=Severity.NOT_CHECKED,
        observed="the version of the installed DeepSpeed is not known",
        why=f"the config was judged by the rules of DeepSpeed {newest}",
        fix="run safelaunch with the Python that has deepspeed installed",
        where=Where(file),
    )


def _open_values(view: View, walked: blocks.Result, unfilled_sizes: list[str]) -> list[Finding]:
    """Name the keys whose values something else fills in, so that they were not judged."""
    findings = []
    placeholders = list(dict.fromkeys([*walked.placeholders, *((name,) for name in unfilled_sizes)]))
    if placeholders:
        findings.append(
            view.finding(
                "config.template",
                Severity.WARNING,
                placeholders[0],
                observed=f"placeholders stand in for values: {_listed(placeholders)}",
                why="DeepSpeed does not replace them, so this file is a template: its values were not judged",
                fix="give the file that your tool makes of it",
            )
        )
    if walked.automatic:
        findings.append(
            view.finding(
                "config.value",
                Severity.INFO,
                walked.automatic[0],
                observed=f'"auto" was not judged: {_listed(walked.automatic)}',
                why="the training framework puts values there when it starts; DeepSpeed alone cannot",
                fix="nothing, if the Hugging Face Trainer, accelerate or Lightning starts DeepSpeed",
            )
        )
    return findings


def _listed(paths: Sequence[KeyPath]) -> str:
    names = [dotted(path) for path in paths]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _position(finding: Finding) -> tuple[int, int]:
    where = finding.where
    return ((where.line or 0), (where.column or 0)) if where else (0, 0)
