"""Which variables the ranks get from us, from where, and what is wrong with them."""

from __future__ import annotations

import difflib
from datetime import timedelta
from typing import TYPE_CHECKING

from safelaunch.env_file import env_file_paths, parse_env_file
from safelaunch.findings import Finding, Severity
from safelaunch.hostnames import show
from safelaunch.plan import Variable
from safelaunch.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "EXPORTED",
    "SCRUBBED",
    "check_values",
    "env_file_paths",
    "exported",
    "from_flags",
    "parse_env_file",
    "redact",
    "scrub",
]

SHELL = "the launching shell"
FLAG = "--env"

EXPORTED: tuple[tuple[str, str], ...] = (
    ("NCCL* RCCL_*", "NCCL and RCCL; stock deepspeed sends NCCL* where the launching machine has a GPU"),
    ("TORCH_* TORCHINDUCTOR_* TORCHDYNAMO_* PYTORCH_*", "PyTorch, its watchdog and compiler"),
    ("GLOO_* UCX* FI_* RDMAV_* IBV_* SHARP_*", "network libraries; stock deepspeed sends UCX*"),
    ("OMP_* GOMP_* MKL_* KMP_* OPENBLAS_* NUMEXPR_* MALLOC_*", "threads and memory"),
    ("CUDA_* CUDNN_* CUBLAS_* NVIDIA_TF32_OVERRIDE NVTE_*", "CUDA, but for CUDA_VISIBLE_DEVICES"),
    ("HIP_* HSA_* ROCM_* MIOPEN_*", "ROCm, but for the variables that choose devices"),
    ("DS_* DEEPSPEED_*", "DeepSpeed: DS_ACCELERATOR, DEEPSPEED_TIMEOUT and others"),
    ("TRITON_*", "Triton and its cache"),
    ("HF_* HUGGINGFACE_* HUGGING_FACE_* TRANSFORMERS_* TOKENIZERS_* ACCELERATE_*", "Hugging Face libraries"),
    ("WANDB_* MLFLOW* COMET_* NEPTUNE_* CLEARML_*", "experiment trackers; stock deepspeed sends MLFLOW*"),
    ("PYTHON*", "Python, as stock deepspeed; PYTHONPATH gets the working directory in front"),
    ("LD_LIBRARY*", "where libraries are found"),
    ("MV2*", "MVAPICH2, as stock deepspeed"),
    ("ASCEND* HCCL* CNCL* NEUWARE_HOME SDAA_* BCCL* BIREN* SUPA_* BKCL* XPU* XMLIR*", "other accelerators"),
    ("CCL_* ZE_* SYCL_* HABANA_* HCL_* PT_HPU_*", "Intel accelerators"),
    (
        "AML_RUN_ID AZUREML_* NEBULA_* DLTS_JOB_ID DLTS_NUM_WORKER",
        "Azure ML, as stock deepspeed before 0.19.8",
    ),
    ("FC_TASKROLE_NAME FC_TASK_INDEX MASTER_HOST LOCAL_HOST", "Azure ML, as stock deepspeed before 0.19.8"),
)
"""What of the launching shell is sent to the ranks: names or `PREFIX*`, and what they are for."""

# Accelerators whose DeepSpeed back end also sends PATH (export_envs() in deepspeed/accelerator/*.py, 0.19.8).
_SEND_PATH = ("ASCEND", "HCCL", "CNCL", "NEUWARE_HOME", "SDAA", "BCCL", "BIREN", "SUPA_", "BKCL", "XMLIR")
# deepspeed/launcher/runner.py, EXCLUDE_ENVS: nodes with their own values.
_WITHHELD = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}

_LAUNCHER_SETS = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
)
"""What deepspeed.launcher.launch sets for each rank, whatever stood there before."""

SCRUBBED: tuple[str, ...] = (
    *_LAUNCHER_SETS,
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *(
        "NODE_RANK",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "MPIRUN_RANK",
        "MPIRUN_NPROCS",
        "PMIX_RANK",
        "PMI_RANK",
    ),
    *("PMI_SIZE", "PMI_FD", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_*", "PMI_*", "PMIX_*", "PALS_*"),
    *("MV2_COMM_WORLD_*", "TORCHELASTIC_*"),
)
"""Traces of another launcher that are unset for the ranks: names, or `PREFIX*`."""
_SCRUB_NOT = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")
"""Settings of Open MPI that users make and that say nothing of a running job."""
_DEVICE_CHOICES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("MLU_VISIBLE_DEVICES", "SDAA_VISIBLE_DEVICES", "SUPA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
)

_MPI = ("OMPI_", "PMI_", "PMIX_", "MV2_", "MPI_", "MPIRUN_", "PALS_")
_OTHER_LAUNCHERS = (*_MPI, "TORCHELASTIC_")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

ACCELERATORS = ("cpu", "cuda", "hpu", "klxpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu", "xpu.external")
"""Names for DS_ACCELERATOR in DeepSpeed 0.14 to 0.19.8 (deepspeed/accelerator/real_accelerator.py)."""
_LONG_TIMEOUT = 24 * 60
"""Minutes from which a DEEPSPEED_TIMEOUT looks like seconds."""


class _Names:
    """A set of names and of prefixes, which end in `*`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self._names = {pattern for pattern in patterns if not pattern.endswith("*")}
        self._prefixes = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))

    def __contains__(self, name: str) -> bool:
        return name in self._names or name.startswith(self._prefixes)


_SCRUBBED = _Names(SCRUBBED)


def _is_scrubbed(name: str) -> bool:
    return name in _SCRUBBED and not name.startswith(_SCRUB_NOT)


def scrub(names: Iterable[str]) -> tuple[str, ...]:
    """Return which names to unset for the ranks: those of `SCRUBBED`, and of `names` what its prefixes match.

    A variable that the user gives to the ranks goes before this, even one of these names.
    """
    plain = [pattern for pattern in SCRUBBED if not pattern.endswith("*")]
    return tuple(dict.fromkeys([*plain, *(name for name in names if _is_scrubbed(name))]))


def exported(
    environ: Mapping[str, str], extra: Sequence[str], *, cwd: str | None = None
) -> tuple[Variable, ...]:
    """Return what the launching shell's environment gives to the ranks.

    `extra` are further names or `PREFIX*`, from the settings; a bare `*` is ignored, since the whole
    environment of one machine is wrong on another. With `cwd`, PYTHONPATH is that directory in
    front of the old value, as with stock deepspeed. What the node launcher sets itself, what chooses
    devices, and traces of another launcher are never sent.
    """
    wanted = [pattern for pattern in extra if pattern != "*"]
    sent = _Names([pattern for patterns, _ in EXPORTED for pattern in patterns.split()] + wanted)
    withheld = {name for job, names in _WITHHELD.items() if job in environ for name in names} - set(extra)
    send_path = any(name.startswith(_SEND_PATH) for name in environ)
    values = {
        name: value
        for name, value in environ.items()
        if (name in sent or (name == "PATH" and send_path))
        and name not in withheld
        and name not in _DEVICE_CHOICES
        and name != "DS_ENV_FILE"
        and not _is_scrubbed(name)
    }
    variables = {name: Variable(name=name, value=value, origin=SHELL) for name, value in values.items()}
    if cwd is not None:
        old = environ.get("PYTHONPATH")
        origin = f"the working directory and {SHELL}" if old else "the working directory"
        value = f"{cwd}:{old}" if old else cwd
        variables["PYTHONPATH"] = Variable(name="PYTHONPATH", value=value, origin=origin)
    return tuple(variables.values())


def from_flags(
    items: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[Variable, ...], tuple[Finding, ...]]:
    """Read `--env KEY=VALUE` and `--env KEY` (the launching shell's value); the last one of a name wins."""
    variables = {}
    findings = []
    for item in items:
        name, equals, value = item.partition("=")
        if not name or any(character.isspace() for character in name) or "\0" in item:
            what = f"--env {show(name, 40)}{equals}..." if name else "--env without a name"
            findings.append(_flag(what, "the form is KEY=VALUE or KEY", f"{FLAG} KEY=VALUE"))
        elif equals:
            variables[name] = Variable(name=name, value=value, origin=FLAG)
        elif name in environ:
            variables[name] = Variable(name=name, value=environ[name], origin=f"{FLAG}, {SHELL}")
        else:
            why = "without a value the launching shell's is sent, and it has none"
            observed = f"--env {show(name, 40)}, which is not set in this shell"
            findings.append(_flag(observed, why, f"{FLAG} {show(name, 40)}=VALUE"))
    return tuple(variables.values()), tuple(findings)


def _flag(observed: str, why: str, fix: str) -> Finding:
    return Finding(code="cli.value", severity=Severity.ERROR, observed=observed, why=why, fix=fix)


def check_values(
    variables: Iterable[Variable], environ: Mapping[str, str], world_size: int | None
) -> tuple[Finding, ...]:
    """Judge what the ranks will get (`variables`, the last of a name wins) and what the launching shell has.

    `world_size` is the plan's, None where there is no plan. NCCL's variables are judged elsewhere.
    """
    effective = {name: Variable(name=name, value=value, origin=SHELL) for name, value in environ.items()}
    effective.update({variable.name: variable for variable in variables})
    findings = []
    for name, judge in (
        ("DEEPSPEED_TIMEOUT", _timeout),
        ("DS_ACCELERATOR", _accelerator),
        ("LOCAL_SIZE", _local_size),
    ):
        if name in effective:
            findings += judge(effective[name], effective)
    given = {name: v for name, v in effective.items() if not v.origin.endswith(SHELL) or FLAG in v.origin}
    left = {name: v for name, v in effective.items() if name not in given}
    return (*findings, *_without_effect(given), *_foreign(given), *_stale(left, world_size))


def _value(
    variable: Variable, why: str, fix: str, severity: Severity = Severity.ERROR, observed: str = ""
) -> Finding:
    shown = show(redact(variable.name, variable.value))
    return Finding(
        code="env.value",
        severity=severity,
        observed=f"{variable.name}={shown} ({show(variable.origin)}){observed}",
        why=why,
        fix=fix,
    )


def _timeout(variable: Variable, _: Mapping[str, Variable]) -> list[Finding]:
    why = "deepspeed takes whole minutes and stops at its import with anything else"
    fix = "DEEPSPEED_TIMEOUT=30, the minutes before a collective counts as failed"
    try:
        minutes = int(variable.value)
        timedelta(minutes=minutes)
    except (ValueError, OverflowError):
        return [_value(variable, why, fix)]
    if minutes <= 0:
        return [_value(variable, "the first wait for another rank would time out at once", fix)]
    if minutes >= _LONG_TIMEOUT:
        why = "the unit is minutes, not seconds: a rank that is gone would be waited for that long"
        observed = f", that is {minutes / 60:.0f} hours"
        fix = f"DEEPSPEED_TIMEOUT={max(minutes // 60, 1)}, if {minutes} seconds were meant"
        return [_value(variable, why, fix, Severity.WARNING, observed)]
    return []


def _accelerator(variable: Variable, _: Mapping[str, Variable]) -> list[Finding]:
    if variable.value in ACCELERATORS:
        return []
    near = difflib.get_close_matches(variable.value.strip().lower(), ACCELERATORS, n=1)
    why = f"deepspeed stops at its import; it knows {', '.join(ACCELERATORS)}"
    return [_value(variable, why, f"DS_ACCELERATOR={near[0]}" if near else "unset DS_ACCELERATOR")]


def _local_size(variable: Variable, effective: Mapping[str, Variable]) -> list[Finding]:
    if variable.value.strip().isdecimal():
        return []
    on_cpu = "DS_ACCELERATOR" in effective and effective["DS_ACCELERATOR"].value == "cpu"
    severity = Severity.ERROR if on_cpu else Severity.WARNING
    why = "deepspeed's CPU accelerator reads it as the number of devices and stops if it is no number"
    return [_value(variable, why, "unset LOCAL_SIZE", severity)]


def _without_effect(given: Mapping[str, Variable]) -> Iterator[Finding]:
    """Name what the user gives to the ranks and the node launcher writes over, as with stock deepspeed."""
    for name in _LAUNCHER_SETS:
        if name in given:
            option = {"MASTER_ADDR": "--master_addr", "MASTER_PORT": "--master_port"}.get(name)
            yield _traces(
                {name: given[name]},
                "it has no effect: the node launcher sets its own value for every rank, as with deepspeed",
                f"{option} {show(redact(name, given[name].value))}" if option else f"take out {name}",
            )
    for name in _DEVICE_CHOICES:
        if name in given:
            why = "it has no effect: the node launcher sets it from the slots of the node, as with deepspeed"
            yield _value(given[name], why, f"take out {name}, and choose by --include", Severity.WARNING)


def _foreign(given: Mapping[str, Variable]) -> Iterator[Finding]:
    found = {name: v for name, v in given.items() if _is_scrubbed(name) and name.startswith(_OTHER_LAUNCHERS)}
    if found:
        why = (
            "the ranks get it, and MPI or torchelastic in them will take themselves for a part of another job"
        )
        yield _traces(found, why, f"take out {' '.join(map(show, found))}")


def _stale(left: Mapping[str, Variable], world_size: int | None) -> Iterator[Finding]:
    """Name the traces of another launcher in the shell; a world of one process contradicts nothing."""
    found = {name: variable for name, variable in left.items() if _is_scrubbed(name)}
    if "WORLD_SIZE" in found and found["WORLD_SIZE"].value == str(world_size):
        del found["WORLD_SIZE"]
    sizes = [found[name].value for name in _SIZES if name in found]
    rank = found.get("PMIX_RANK")
    if set(sizes) == {"1"} or (not sizes and rank and rank.value == "0"):
        found = {name: v for name, v in found.items() if not name.startswith(_MPI)}
    if found:
        ours = f", not the {world_size} ranks of this one" if world_size else ""
        chosen = {"MASTER_ADDR", "MASTER_PORT"} & found.keys()
        yield _traces(
            found,
            f"they describe another job{ours}; the ranks do not get them"
            + (" (deepspeed takes no address or port from the environment either)" if chosen else ""),
            f"unset {' '.join(map(show, found))}"
            + ("; --master_addr and --master_port choose" if chosen else ""),
        )


def _traces(found: Mapping[str, Variable], why: str, fix: str) -> Finding:
    shown = [
        show(name) + (f"={show(redact(name, v.value))}" if name in ("WORLD_SIZE", *_SIZES) else "")
        for name, v in found.items()
    ]
    origins = dict.fromkeys(variable.origin for variable in found.values())
    return Finding(
        code="env.stale_rendezvous",
        severity=Severity.WARNING,
        observed=f"{', '.join(shown)} already set ({show(', '.join(origins), 200)})",
        why=why,
        fix=fix,
    )
