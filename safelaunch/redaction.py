"""What of an environment may be shown: safe by default, values only of names known to be technical."""

from __future__ import annotations

import re

REDACTED = "<redacted>"

_LONGEST = 32_768
"""Characters of a value that is looked through at most."""
_SHOWN_PREFIXES = (
    *(
        "ASCEND_",
        "BLIS_",
        "CROSS_",
        "CUBLAS_",
        "CUDA_",
        "CUDNN_",
        "DEEPSPEED_",
        "DS_",
        "FI_",
        "GLOO_",
        "GOMP_",
    ),
    *("HCCL_", "HIP_", "HSA_", "KMP_", "LOCAL_", "MALLOC_", "MASTER_", "MIOPEN_", "MKL_", "MV2_", "NCCL_"),
    *(
        "NUMEXPR_",
        "NVTE_",
        "OMP_",
        "OMPI_",
        "OPENBLAS_",
        "PMI_",
        "PMIX_",
        "PYTHON",
        "PYTORCH_",
        "RCCL_",
        "ROCR_",
    ),
    *(
        "SAFELAUNCH_",
        "TORCH_",
        "TORCHDYNAMO_",
        "TORCHELASTIC_",
        "TORCHINDUCTOR_",
        "TRITON_",
        "UCX_",
        "XLA_",
        "ZE_",
    ),
)
_SHOWN_NAMES = {
    *(
        "HF_DATASETS_CACHE",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "LD_LIBRARY_PATH",
    ),
    *(
        "PATH",
        "RANK",
        "TOKENIZERS_PARALLELISM",
        "TRANSFORMERS_CACHE",
        "TRANSFORMERS_OFFLINE",
        "WANDB_DISABLED",
    ),
    *("WANDB_MODE", "WORLD_SIZE"),
}
_SECRET_NAME = re.compile(
    r"SECRET|PASSW|CREDENTIAL|PRIVATE"
    r"|(TOKENS?|KEYS?|PASS|PASSPHRASE|PWD|AUTH|AUTHORIZATION|BEARER|COOKIES?|JWT|PAT|DSN)(_|\Z)"
)
_SECRET_VALUE = re.compile(
    r"://[^/\s@]*@"  # user information of a URL
    r"|(?<![^\s/:@,])[^\s/:@,]+:[^\s/:@,]+@"  # the same without a scheme
    r"|[?&;](sig|signature|token|key|secret|password|auth|credential|x-amz-[a-z-]*)="
    r"|\b(bearer|basic)\s+\S{8}"
    r"|-----BEGIN"
    r"|\b(sk|pk|rk)[-_][A-Za-z0-9_-]{8}|\b(hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[a-z]|nvapi|dapi)[-_]?[A-Za-z0-9]{8}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{12}|\beyJ[A-Za-z0-9_-]{8}",
    re.IGNORECASE,
)
_LONG = re.compile(r"[A-Za-z0-9+_-]{20,}|(?<![\w/.~-])[A-Za-z0-9+][A-Za-z0-9+/]{31,}")
_HEX = re.compile(r"[0-9A-Fa-f-]{32,}")


def redact(name: str, value: str) -> str:
    """Return what may be shown of a variable's value: itself, or `<redacted>`.

    A value is shown where the name is known to be technical and does not sound like a secret, and the value
    does not look like one: no user information of a URL, no long random text, nothing that can't be printed.
    """
    known = name in _SHOWN_NAMES or name.startswith(_SHOWN_PREFIXES)
    if len(value) > _LONGEST or not known or _SECRET_NAME.search(name.upper()) or not value.isprintable():
        return REDACTED
    if _SECRET_VALUE.search(value) or any(_is_random(match[0]) for match in _LONG.finditer(value)):
        return REDACTED
    return value


def _is_random(text: str) -> bool:
    if _HEX.fullmatch(text):
        return True
    digits = sum(character.isdigit() for character in text)
    if text.isalnum() and len(text) >= 24 and 5 <= digits <= len(text) - 5:
        return True
    kinds = (str.islower, str.isupper, str.isdigit)
    return all(any(kind(character) for character in text) for kind in kinds)
