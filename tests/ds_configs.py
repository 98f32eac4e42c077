"""What the tests of DeepSpeed configs share: judging one, and writing batch sizes."""

import json

from safelaunch import ds_config
from safelaunch.ds_rules import tables
from safelaunch.findings import errors

NEWEST = tables.show(tables.NEWEST)
MICRO = "train_micro_batch_size_per_gpu"


def check(config, version=NEWEST, world=8, args=()):
    text = config if isinstance(config, (str, bytes)) else json.dumps({MICRO: 1, **config})
    data = text if isinstance(text, bytes) else text.encode()
    return ds_config.check(
        data, "ds.json", deepspeed_version=version, world_size=world, script_args=list(args)
    )


def codes(findings, severity=None):
    return [f.code for f in findings if severity is None or f.severity is severity]


def error_codes(config, **kwargs):
    return codes(errors(check(config, **kwargs)))


def only(findings, code):
    (finding,) = [f for f in findings if f.code == code]
    return finding


def batch(train=None, micro=None, steps=None):
    names = {"train_batch_size": train, MICRO: micro, "gradient_accumulation_steps": steps}
    return json.dumps({name: value for name, value in names.items() if value is not None})
