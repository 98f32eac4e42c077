"""Asks the installed DeepSpeed about configs; run by tests/test_ds_config.py as a process of its own.

stdin: a list of config texts. stdout: the verdict on each at world size 8 (null where DeepSpeed accepts it),
the fields of its pydantic models, and the keys that it reads from the parts which are no models.
"""

import json
import logging
import os
import sys
import tempfile
import typing

os.environ["DS_ACCELERATOR"] = "cpu"
logging.disable(logging.CRITICAL)

from deepspeed.runtime import config as ds_config  # noqa: E402  the accelerator is chosen at import
from deepspeed.runtime.config_utils import DeepSpeedConfigModel  # noqa: E402

WORLD_SIZE = 8
ds_config.dist.get_world_size = lambda *_, **__: WORLD_SIZE
ds_config.dist.get_rank = lambda *_, **__: 0

PLAIN = {
    "activation_checkpointing": {},
    "aio": {},
    "autotuning": {},
    "data_efficiency": {
        "data_sampling": {"curriculum_learning": {}, "dynamic_batching": {}},
        "data_routing": {"random_ltd": {}},
    },
    "data_types": {},
    "flops_profiler": {},
    "optimizer": {"type": "adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "timers": {"throughput": {}},
    "torch_autocast": {"dtype": "fp16"},
    "checkpoint": {"parallel_write": {}, "writer": {}},
}


class Spy(dict):
    """A dict that records which of its keys were asked for."""

    seen: typing.ClassVar = {}

    def __init__(self, values, path):
        super().__init__(
            {k: Spy(v, f"{path}.{k}".strip(".")) if isinstance(v, dict) else v for k, v in values.items()}
        )
        self.path = path

    def note(self, key):
        self.seen.setdefault(self.path, set()).add(key)

    def get(self, key, default=None):
        self.note(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.note(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.note(key)
        return super().__contains__(key)

    def keys(self):
        return Names(self)

    def __copy__(self):
        copied = Spy({}, self.path)
        copied.update(self)
        return copied


class Names:
    def __init__(self, spy):
        self.spy = spy

    def __contains__(self, key):
        return key in self.spy

    def __iter__(self):
        return dict.__iter__(self.spy)


def keys_read():
    for values in ({}, PLAIN, {"autotuning": {"model_info": {}}}, {"autotuning": {}}):
        ds_config.DeepSpeedConfig(Spy({"train_batch_size": WORLD_SIZE, **values}, ""))
    return {path: sorted(names) for path, names in Spy.seen.items()}


def model_fields(model):
    fields = {}
    for name, info in model.model_fields.items():
        extra = info.json_schema_extra or {}
        fields[name] = {
            "alias": info.alias,
            "type": str(info.annotation),
            "bounds": [str(bound) for bound in info.metadata],
            "replaced": extra.get("new_param") if extra.get("set_new_param", True) else None,
        }
    return fields


def subclasses(model):
    for sub in model.__subclasses__():
        yield sub
        yield from subclasses(sub)


def verdict(path):
    try:
        ds_config.DeepSpeedConfig(path)
    except Exception as error:  # noqa: BLE001  whatever it raises stops a rank
        return f"{type(error).__name__}: {error}"[:300]
    return None


def main():
    texts = json.load(sys.stdin)
    # DeepSpeed itself prints to stdout.
    answer, sys.stdout = sys.stdout, sys.stderr
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ds.json")
        for text in texts:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            verdicts.append(verdict(path))
    models = {f"{m.__module__}.{m.__name__}": model_fields(m) for m in subclasses(DeepSpeedConfigModel)}
    json.dump({"verdicts": verdicts, "models": models, "read": keys_read()}, answer)


if __name__ == "__main__":
    main()
