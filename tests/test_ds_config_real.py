"""DeepSpeed configs that people use, and odd ones, against the verdicts of real DeepSpeed."""

import importlib.metadata
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ds_configs import MICRO, NEWEST, batch, check, codes

from safelaunch import located
from safelaunch.ds_rules import blocks, tables
from safelaunch.ds_rules.view import View
from safelaunch.findings import errors

SHARED = Path(__file__).parents[2] / "shared" / "data" / "real-inputs"

# Their only fault is a placeholder such as ZERO_STAGE, which the user's own tool replaces before the file is
# used: a warning, since which value it will be cannot be known.
TEMPLATES = {f"ds-{number}.json" for number in ("009", "037", "051", "074", "117", "118", "122")}
TEMPLATES_BEFORE_REMOVALS = {f"ds-{number}.json" for number in ("091", "098", "146")}
# Accepted after filling at some world size, but 8 is not in the set that its elasticity block allows.
ELASTIC = "ds-161.json"


@pytest.fixture(scope="module")
def real():
    if not (SHARED / "expected.json").exists():
        pytest.skip("../shared/data/real-inputs is not there")
    return json.loads((SHARED / "expected.json").read_text())["ds-configs"]


class TestRealConfigs:
    def judge(self, name, version, world):
        return errors(check((SHARED / "ds-configs" / name).read_bytes(), version=version, world=world))

    @pytest.mark.parametrize("version", ["0.14.5", "0.16.9", "0.18.6", "0.19.8"])
    def test_verdicts(self, real, version):
        wrong = []
        for name, expected in real.items():
            status = expected["by_version"][version]
            found = self.judge(name, version, 8)
            templates = TEMPLATES if version == "0.19.8" else TEMPLATES | TEMPLATES_BEFORE_REMOVALS
            if status == "rejected":
                right = bool(found) != (name in templates)
            elif status == "accepted_at_other_world_size":
                right = {f.code for f in found} in ({"config.batch"}, {"config.elastic"})
                right = right and all(
                    not self.judge(name, version, world) for world in expected.get("world_sizes", [])
                )
            elif name == ELASTIC:
                right = codes(found) == ["config.elastic"] and not self.judge(name, version, 4)
            else:
                right = not found
            if not right:
                wrong.append((name, status, [(f.code, f.observed) for f in found]))
        assert wrong == []

    def test_templates_are_named(self, real):
        found = {name for name in real if "config.template" in self.all_codes(name)}
        assert found == {name for name, expected in real.items() if expected.get("template")}

    def test_every_auto_is_named(self, real):
        for name, expected in real.items():
            if expected["syntax"] == "unreadable":
                continue
            document = located.read((SHARED / "ds-configs" / name).read_text())
            view = View(value=document.value, places=document.places, file=name, version=tables.NEWEST)
            named = {".".join(path) for path in blocks.check(view).automatic}
            assert named == set(expected.get("auto", [])), name

    def test_derived_sizes_are_deepspeeds(self, real):
        derived = 0
        for name, expected in real.items():
            text = (SHARED / "ds-configs" / name).read_bytes()
            said = [f for f in check(text) if f.code == "config.batch_derived"]
            if said and "batch_at_8" in expected:
                train, micro, steps = expected["batch_at_8"]
                assert f"{micro} x {steps} x 8 = {train}" in said[0].observed, name
                derived += 1
        assert derived > 10

    def all_codes(self, name):
        return codes(check((SHARED / "ds-configs" / name).read_bytes()))


# Against the installed DeepSpeed

ODD_VALUES = [
    True,
    False,
    0,
    1,
    2,
    -1,
    2.5,
    0.5,
    1e12,
    "2",
    "2.5",
    "x",
    "true",
    "fp16",
    "sum",
    "",
    None,
    [],
    {},
]
ODD_VALUES += [["a"], [1], {"a": 1}, "auto", "warn", "cpu", "step", 10**30]

COMBINATIONS = [
    # Batch sizes.
    *(batch(*sizes) for sizes in [(8,), (16, 1), (16, 1, 2), (16, None, 2), (None, 2), (None, 2, 3)]),
    *(
        batch(*sizes)
        for sizes in [(7,), (16, 3), (16, 1, 3), (17, None, 2), (4,), (8, 2), (64, 2, 8), (9, 1)]
    ),
    *(batch(*sizes) for sizes in [(-8,), (None, -1), (None, 1, 0), (0, 1), (8, 0), (24, 3), (100, 3)]),
    # Precision.
    *(
        json.dumps({MICRO: 1, **rest})
        for rest in [
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            {"fp16": {"enabled": True}, "bf16": {"enabled": False}},
            {"fp16": {"enabled": "true"}, "bf16": {"enabled": 1}},
            {"fp16": {"enabled": True}, "bfloat16": {"enabled": True}},
            {"fp16": {"enabled": True}, "bfloat16": {"enabled": True}, "bf16": {}},
            {"fp16": {"enabled": True}, "bfloat16": {"enabled": True}, "bf16": None},
            {"bf16": {"nonsense": 1}, "bfloat16": {"enabled": True}},
            {"bfloat16": {"nonsense": 1}},
            {"fp16": {"enabled": True, "loss_scale": 0, "min_loss_scale": 0}},
            {"fp16": {"enabled": True, "loss_scale": 8, "min_loss_scale": 0}},
            {"fp16": {"enabled": False, "loss_scale_window": 0}},
            {"fp16": {"enabled": True, "loss_scale_window": "0"}},
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            *(
                {
                    "zero_optimization": {"stage": s},
                    p: {"enabled": True, f"{p}_master_weights_and_grads": True},
                }
                for s in range(4)
                for p in ("fp16", "bf16")
            ),
            {"zero_optimization": {"stage": 1}, "bf16": {"bf16_optimizer_states": True}},
            {
                "zero_optimization": {"stage": 1},
                "bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
            },
            # ZeRO and offload.
            {"zero_optimization": True},
            {"zero_optimization": False},
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": None}},
            {"zero_optimization": {"stage": 2, "cpu_offload": "auto", "offload_optimizer": {}}},
            {
                "zero_optimization": {
                    "stage": 3,
                    "cpu_offload_param": True,
                    "offload_param": {"device": "cpu"},
                }
            },
            {"zero_optimization": {"cpu_offload_use_pin_memory": True, "offload_param": {}}},
            {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}},
            {"zero_optimization": {"max_live_parameters": 1}},
            {
                "zero_optimization": {
                    "stage3_gather_fp16_weights_on_model_save": True,
                    "stage3_gather_16bit_weights_on_model_save": True,
                }
            },
            *({"zero_optimization": {"stage": s, "offload_optimizer": {"ratio": 0.5}}} for s in range(4)),
            *({"zero_optimization": {"stage": s, "compute_grad_norm": False}} for s in range(4)),
            *({"zero_optimization": {"stage": s}, "gradient_allreduce_op": "SUM"} for s in range(4)),
            {"zero_optimization": {"stage": 1, "zenflow": {}}, "gradient_allreduce_op": "sum"},
            {"compile": {"deepcompile": True}, "gradient_allreduce_op": "sum"},
            {"zero_optimization": {"mics_shard_size": "auto"}},
            {"zero_optimization": {"whatever": "auto"}},
            {"zero_optimization": {"leaf_module": {"classes": "A", "other": 1}}},
            # Parts that are no models.
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
            {"tensor_parallel": {"tp": {"tp_size": 2, "nonsense": 1}}},
            {"tensor_parallel": {"tp": {"tp_size": 2}, "tensor_parallel": {"tp_size": 2}}},
            {"timers": {"throughput": {"nonsense": 1}}},
            {"optimizer": {"type": None, "params": []}},
            {"nonsense": {"a": [1, {"b": None}]}},
        ]
    ),
    # The dialect.
    '{"train_batch_size": 8, "train_batch_size": 8}',
    '{"train_batch_size": 8, "fp16": {"enabled": false, "enabled": false}}',
    "# no braces\ntrain_batch_size: 8\nfp16: {\n  enabled: true\n}\n",
    "{train_batch_size: 8 /* eight */, fp16: {enabled: True}\n}",
    '{"train_batch_size": 8,,}',
    '{"train_batch_size": 8,}',
    "[]",
    "8",
    '{"train_batch_size": 1e999}',
    "{train_batch_size: '''8'''}",
    "",
]


def single_keys():
    """Every key of the tables with every odd value, alone beside a batch size."""
    for block in tables.blocks().values():
        for name in block.in_version(tables.NEWEST):
            for value in ODD_VALUES:
                config = {name: value}
                for step in reversed(block.path):
                    config = {step: config}
                yield json.dumps({MICRO: 1, **config} if name != MICRO else config)


def random_mixes():
    chooser = random.Random(7)
    singles = [json.loads(text) for text in single_keys()]
    for _ in range(300):
        config = {}
        for part in chooser.sample(singles, 3):
            for name, value in part.items():
                if isinstance(value, dict) and isinstance(config.get(name), dict):
                    config[name].update(value)
                else:
                    config[name] = value
        yield json.dumps(config)


def stricter(text, found):
    """Tell whether we refuse on purpose what DeepSpeedConfig lets pass, because it cannot do right later."""
    if any(name in text for name in ("train_batch_size", MICRO, "gradient_accumulation_steps")):
        # Fractions and booleans: DeepSpeed only multiplies.
        return {f.code for f in found} == {"config.batch"} and (
            "." in text or "true" in text or "1000" in text
        )
    return False


@pytest.fixture(scope="module")
def oracle():
    texts = [*COMBINATIONS, *single_keys(), *random_mixes()]
    script = Path(__file__).with_name("deepspeed_oracle.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    answer["verdicts"] = list(zip(texts, answer["verdicts"], strict=True))
    return answer


INSTALLED = importlib.metadata.version("deepspeed")

MODELS = {
    "runtime.zero.config.DeepSpeedZeroConfig": "zero_optimization",
    "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "runtime.zenflow.zenflow_config.ZenFlowConfig": "zero_optimization.zenflow",
    "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "runtime.precision_config.DeepSpeedFP16Config": "fp16",
    "runtime.precision_config.DeepSpeedBF16Config": "bf16",
    "runtime.tensor_parallel.config.TPTrainingConfig": "tensor_parallel",
    "runtime.tensor_parallel.config.TPConfig": "tensor_parallel.tensor_parallel",
    "runtime.config.HybridEngineConfig": "hybrid_engine",
    "comm.config.CommsLoggerConfig": "comms_logger",
    "monitor.config.TensorBoardConfig": "tensorboard",
    "monitor.config.WandbConfig": "wandb",
    "monitor.config.CSVConfig": "csv_monitor",
    "monitor.config.CometConfig": "comet",
    "inference.config.WeightQuantConfig": "weight_quantization",
    "compile.config.CompileConfig": "compile",
    "utils.config.DeepSpeedThroughputTimerConfig": "timers.throughput",
}
# Models that are no part of the training config: inference, and the base classes.
OTHER_MODELS = re.compile(r"\.inference\.|\.monitor\.config\.DeepSpeedMonitorConfig$")
# Read from the config outside of DeepSpeedConfig, or only in forms that the oracle does not give.
READ_ELSEWHERE = {"allgather_size", "sequence_parallel_size", "data_parallel_size"}


@pytest.mark.deepspeed
class TestInstalledDeepSpeed:
    def test_same_verdicts(self, oracle):
        if tables.version_of(INSTALLED) != tables.NEWEST:
            pytest.skip(f"the odd values are those of {NEWEST}, DeepSpeed here is {INSTALLED}")
        wrong = []
        for text, refusal in oracle["verdicts"]:
            found = errors(check(text, version=INSTALLED))
            # Filled in by frameworks; or decided by the accelerator, not by the config.
            open_value = '"auto"' in text or re.search("needs to be provided|GDS currently", refusal or "")
            if refusal is None and found and not stricter(text, found):
                unfit = [f for f in found if '"nvme_path"' not in f.observed]
                wrong += [(text, "accepted", [(f.code, f.observed) for f in unfit])] if unfit else []
            elif refusal is not None and not found and not open_value:
                wrong.append((text, refusal, []))
        assert wrong == []

    def test_tables_hold_every_field_of_the_models(self, oracle):
        version = tables.version_of(INSTALLED)
        models = {
            name.removeprefix("deepspeed."): fields
            for name, fields in oracle["models"].items()
            if name.removeprefix("deepspeed.") in MODELS or not OTHER_MODELS.search(name)
        }
        assert set(models) == set(MODELS)
        for model, fields in models.items():
            keys = tables.blocks()[tuple(MODELS[model].split("."))].in_version(version)
            assert {n: f["alias"] for n, f in fields.items()} == {
                key.name: key.alias for key in keys.values()
            }, model
            for name, field in fields.items():
                self.compare(model, name, keys[name], field)

    def compare(self, model, name, key, field):
        said = (model, name, field["type"])
        base = key.kind.rstrip("?")
        pattern = {
            "{}": r"Config\b",
            "any": "object",
            "plain_int": r"\bint\b",
            "loss_scale": "float",
            "words": r"List\[str\]",
            "names": "List",
            "stage": "ZeroStageEnum",
            "path": "Path",
            "never": r"torch\.dtype",
            "interval": r"Union\[str, int\]",
            "list": "list|tuple",
            "dict": "Dict",
        }.get(base, rf"\b{base}\b")
        if ":" in base:
            words = base.partition(":")[2].split("|")
            pattern = "Literal|Enum|'str'"
            if "Literal" in field["type"]:
                assert re.findall(r"'([^']+)'", field["type"]) == words, said
        assert re.search(pattern, field["type"]), said
        if base != "{}":
            assert ("Optional" in field["type"]) == key.kind.endswith("?"), said
        signs = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
        bounds = [re.fullmatch(r"(\w\w)\(\w\w=([\d.]+)\)", bound).groups() for bound in field["bounds"]]
        expected = {(signs[sign], float(number)) for sign, number in bounds}
        if base != "interval":
            ours = {re.fullmatch(r"([<>=]+)(.+)", bound).groups() for bound in key.bounds}
            assert {(sign, float(number)) for sign, number in ours} == expected, said
        assert key.replaced == field["replaced"], said

    def test_tables_hold_every_key_that_is_read(self, oracle):
        version = tables.version_of(INSTALLED)
        read = {tuple(path.split(".")) if path else (): set(names) for path, names in oracle["read"].items()}
        removed = {key.name for block in tables.blocks().values() for key in block.keys if key.gone_refused}
        for path, names in read.items():
            block = tables.blocks().get(path)
            if block is None or block.is_open or block.refuses(version):
                continue
            known = set(block.in_version(version))
            assert names - removed <= known, path
            unread = known - names - READ_ELSEWHERE
            assert unread == set(), path
        assert {(), ("aio",), ("checkpoint", "writer"), ("data_efficiency", "data_sampling")} <= set(read)
