"""DeepSpeed configs: reading with positions, and each rule."""

import base64
import json
import re

import hjson
import pytest
from ds_configs import MICRO, NEWEST, batch, check, codes, error_codes, only
from hypothesis import given, settings
from hypothesis import strategies as st

from safelaunch import catalogue, ds_config, located
from safelaunch.ds_rules import arguments, elastic, kinds, tables
from safelaunch.findings import Severity, errors

# Reading


class TestReading:
    def test_places_of_keys_count_from_one(self):
        document = located.read('{\n  "a": {"b": 1},\n  c: [{d: 2}]\n}\n')
        assert document.value == {"a": {"b": 1}, "c": [{"d": 2}]}
        assert document.places == {
            ("a",): located.Place(2, 3),
            ("a", "b"): located.Place(2, 9),
            ("c",): located.Place(3, 3),
            ("c", "0", "d"): located.Place(3, 8),
        }

    def test_a_key_is_found_behind_comments_and_blanks(self):
        document = located.read("# one\n/* two\n */ { // three\n\n   'a': 1 }")
        assert document.places == {("a",): located.Place(5, 4)}

    def test_duplicates_name_both_places(self):
        (duplicate,) = located.read('{"z": {"a": 1,\n "a": 2}}').duplicates
        assert duplicate == located.Duplicate(("z", "a"), located.Place(1, 8), located.Place(2, 2))

    @pytest.mark.parametrize(
        ("text", "line", "column", "word"),
        [
            ('{\n "a": ,\n}', 2, 7, "value is missing"),
            ('{"a": 1', 1, 8, "'}' is missing"),
            ('{"a": [1, 2', 1, 12, "missing"),
            ('{"a" 1}', 1, 6, "':' is missing"),
            ('{"a": 1} x', 1, 10, "follows"),
            ('{"a": "b\n"}', 1, 9, "line break"),
            ('{\n"a": 1e999}', 2, 1, "number"),
            ('{"a": /* never', 1, 2, "not closed"),
            ('{"a": ' + "9" * 5000 + "}", 1, 2, "number"),
            ("{a:" * 5000, 1, None, "deep"),
        ],
    )
    def test_unreadable_text_tells_where_and_why(self, text, line, column, word):
        (finding,) = errors(check(text))
        assert finding.code == "config.syntax"
        assert word in finding.observed
        assert finding.where.line == line
        assert column in (None, finding.where.column)

    @pytest.mark.parametrize(
        ("data", "line", "column"), [(b'{\n "a\xff": 1}', 2, 4), (b"\xff", 1, 1), (b"\r\n\r\xc3", 3, 1)]
    )
    def test_bytes_that_are_no_utf8(self, data, line, column):
        (finding,) = check(data)
        assert (finding.code, finding.where.line, finding.where.column) == ("config.syntax", line, column)

    @pytest.mark.parametrize("text", ["[1]", "7", '"x"', "null"])
    def test_what_is_no_object(self, text):
        assert error_codes(text) == ["config.syntax"]

    def test_byte_order_mark_and_carriage_returns_are_read(self):
        (finding,) = errors(check(b'\xef\xbb\xbf{\r\n"train_batch_size": 8,\r\n "fp16": 1}'))
        assert (finding.where.line, finding.where.column) == (3, 2)

    def test_hjson_is_said_and_matters_to_the_trainer(self):
        text = '{"train_batch_size": 8, # eight\n}'
        assert only(check(text), "config.syntax").severity is Severity.INFO
        found = only(check(text, args=["--deepspeed", "ds.json"]), "config.syntax")
        assert found.severity is Severity.WARNING
        assert not check('{"train_batch_size": 8}')

    def test_load_reads_as_deepspeed_does(self):
        assert ds_config.load(b"{a: 2e8\n b: text, more\n}") == {"a": 200000000, "b": "text, more"}
        with pytest.raises(ValueError, match="duplicate key a"):
            ds_config.load(b'{"a": 1, "a": 1}')
        with pytest.raises(located.UnreadableError):
            ds_config.load(b"{")


PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", "\n", "\n", " ", "#", "//", "/*", "*/", "'''", '"', "'", "\\"),
        *("\t", "a", "b:", '"k":', "k :", "true", "false", "null", "0", "-1", "2.5", "1e3", "2e10", "1e400"),
        *("08", "NaN", "\\u00e9", "\\ud800", "x y", "é", "\ufeff", "\x00", '"s"', "'t'", "a: 1\n", "{}"),
    ]
)


def same(one, other):
    return type(one) is type(other) and one == other


class TestReaderAgainstHjson:
    @settings(max_examples=500, deadline=None)
    @given(st.lists(PIECES, max_size=25).map("".join))
    def test_same_value_or_both_refuse(self, text):
        self.compare(text)

    @settings(max_examples=150, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
        )
    )
    def test_values_written_by_both_libraries(self, value):
        self.compare(json.dumps(value))
        self.compare(hjson.dumps(value))

    def compare(self, text):
        try:
            expected = hjson.loads(text, object_pairs_hook=dict)
        except Exception:  # noqa: BLE001  hjson leaks IndexError, OverflowError and others
            with pytest.raises(located.UnreadableError):
                located.read(text)
        else:
            assert same(located.read(text).value, expected)


class TestAnyBytes:
    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=60) | st.lists(PIECES, max_size=20).map("".join).map(str.encode))
    def test_findings_only(self, data):
        self.judge(data)

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_odd_values_in_known_places(self, data):
        value = st.recursive(
            st.sampled_from([None, True, "auto", "", "X_Y", "${a}", -1, 0, 3, 10**30, 10**400, 1e300, 0.5]),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner),
            max_leaves=6,
        )
        config = data.draw(st.dictionaries(st.sampled_from(NAMES), value, max_size=6))
        self.judge(json.dumps(config).encode())

    def judge(self, data):
        for version in ("0.14.0", "0.17.0", NEWEST, None, "nonsense", "99.0.0"):
            for world in (None, 8):
                for finding in check(data, version=version, world=world, args=["--bf16", "--lr", "inf"]):
                    assert finding.code in catalogue.CODES
                    json.dumps(finding.document())
                    assert finding.observed.isprintable()


NAMES = sorted({name for block in tables.blocks().values() for key in block.keys for name in key.names})


# Keys and values


class TestKeys:
    def test_unknown_top_level_key_is_a_warning_with_its_place(self):
        finding = only(check('{"train_batch_size": 8,\n  "gradient_cliping": 1}'), "config.unknown_key")
        assert finding.severity is Severity.WARNING
        assert '"gradient_clipping"' in finding.fix
        assert (finding.where.line, finding.where.column) == (2, 3)

    def test_unknown_nested_key_is_an_error_where_deepspeed_refuses_it(self):
        finding = only(check({"zero_optimization": {"cpu-offload": False}}), "config.unknown_key")
        assert finding.severity is Severity.ERROR
        assert '"cpu_offload"' in finding.fix
        assert only(check({"aio": {"block": 1}}), "config.unknown_key").severity is Severity.WARNING

    def test_fp16_refuses_unknown_keys_only_since_it_is_a_model(self):
        config = {"fp16": {"enabled": True, "opt_level": "O2"}}
        assert error_codes(config, version="0.17.0") == []
        assert error_codes(config, version="0.17.1") == ["config.unknown_key"]

    def test_a_key_of_a_newer_release_names_that_release(self):
        config = {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}
        assert "0.17.5" in only(check(config, version="0.17.4"), "config.unknown_key").observed
        assert check(config, version="0.17.5", world=None) == []

    def test_a_newer_deepspeed_than_the_tables_may_know_more(self):
        config = {"zero_optimization": {"brand_new": 1}}
        assert only(check(config, version="0.20.0"), "config.unknown_key").severity is Severity.WARNING

    def test_removed_keys_say_the_last_release(self):
        finding = only(check({"nebula": {}}), "config.removed_key")
        assert finding.severity is Severity.ERROR
        assert "0.19.6" in finding.observed
        assert error_codes({"nebula": {}}, version="0.19.6") == []
        assert only(check({"aio": {"thread_count": 1}}), "config.removed_key").severity is Severity.WARNING
        assert error_codes({"zero_optimization": {"mics_shard_size": 2}}) == ["config.removed_key"]

    def test_optimizers_that_are_gone_or_never_were(self):
        config = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}
        assert only(check(config), "config.removed_key").severity is Severity.WARNING
        assert "config.removed_key" not in codes(check(config, version="0.19.6"))
        assert '"AdamW"' in only(check({"optimizer": {"type": "AdmW"}}), "config.value").fix
        assert '"WarmupLR"' in only(check({"scheduler": {"type": "WarmUpLr"}}), "config.value").fix

    def test_notes_to_oneself_are_left_alone(self):
        assert codes(check({"_comment": "x", "//": "y", "comments": 1}, world=None)) == []

    def test_two_names_of_one_setting(self):
        both = {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1}
        assert error_codes({"zero_optimization": both}) == ["config.zero"]
        old = {"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}
        assert error_codes({"zero_optimization": old}) == ["config.offload"]

    def test_values_of_wrong_types(self):
        assert error_codes({"fp16": {"enabled": True, "min_loss_scale": 0.5}}) == ["config.precision"]
        assert error_codes({"zero_optimization": {"stage": 4}}) == ["config.zero"]
        assert error_codes({"zero_optimization": {"offload_param": {"device": "gpu"}}}) == ["config.offload"]
        assert error_codes({"wall_clock_breakdown": "true"}) == ["config.value"]
        assert error_codes({"tensorboard": []}) == ["config.value"]
        assert codes(check({"steps_per_print": "10"}, world=None), Severity.WARNING) == ["config.value"]

    def test_pydantic_1_cut_fractions_off(self):
        config = {"zero_optimization": {"stage": 3, "sub_group_size": 2.5}}
        assert error_codes(config, version="0.14.5") == []
        assert error_codes(config, version="0.15.0") == ["config.zero"]

    def test_unknown_version_is_said(self):
        for version in (None, "nonsense"):
            assert codes(check({}, version=version), Severity.NOT_CHECKED) == ["config.value"]


class TestOpenValues:
    def test_auto_is_information_and_names_the_keys(self):
        found = check({MICRO: "auto", "bf16": {"enabled": "auto"}, "optimizer": {"params": {"lr": "auto"}}})
        assert codes(found) == ["config.value"]
        assert found[0].severity is Severity.INFO
        for name in (MICRO, "bf16.enabled", "optimizer.params.lr"):
            assert name in found[0].observed

    def test_placeholders_make_a_template(self):
        text = '{"train_batch_size": GLOBAL_BATCH,\n "zero_optimization": {"stage": ${stage},\n}}'
        finding = only(check(text), "config.template")
        assert finding.severity is Severity.WARNING
        assert finding.where.line == 1
        assert "train_batch_size, zero_optimization.stage" in finding.observed
        assert errors(check(text)) == []

    def test_a_word_in_capitals_is_no_placeholder_where_text_is_right(self):
        assert codes(check({"tensorboard": {"job_name": "RUN_7"}}, world=None)) == []


# Batch arithmetic


class TestBatch:
    def test_the_sum_and_the_ways_to_make_it_right(self):
        finding = only(check(batch(32, 2, 8)), "config.batch")
        assert "32 is not micro batch 2 x 8 accumulation steps x 8 data-parallel ranks = 128" in (
            finding.observed
        )
        assert '"train_batch_size": 128' in finding.fix
        assert '"gradient_accumulation_steps": 2' in finding.fix
        assert "start 2 ranks in place of 8" in finding.fix

    @pytest.mark.parametrize("given", [(64, 2, 4), (64, 2, None), (64, None, 4), (8, None, None), (8, 1)])
    def test_sizes_that_fit(self, given):
        assert check(batch(*given)) == []

    @pytest.mark.parametrize(
        "given", [(63, 2, 4), (65, 2, None), (65, None, 4), (4, None, None), (9, None), (8, 2, None), (0, 1)]
    )
    def test_sizes_that_do_not(self, given):
        assert error_codes(batch(*given)) == ["config.batch"]

    @pytest.mark.parametrize(
        "given", [(64, 2, 3), (64, 2), (48, 5), (7, None, 3), (1, None), (9, 2, 2), (100, 7, 3)]
    )
    def test_each_way_out_is_right(self, given):
        (finding,) = errors(check(batch(*given), world=24))
        sizes = dict(zip(("train_batch_size", MICRO, "gradient_accumulation_steps"), given, strict=False))
        for way in finding.fix.split("; or "):
            changed = {name: value for name, value in sizes.items() if value is not None}
            world = 24
            if match := re.fullmatch(r'set "(\w+)": (\d+)', way):
                changed[match[1]] = int(match[2])
            else:
                world = int(re.match(r"start (\d+) rank", way)[1])
            assert errors(check(json.dumps(changed), world=world)) == [], way

    def test_derived_train_batch_is_said(self):
        assert "4 x 2 x 8 = 64" in only(check(batch(None, 4, 2)), "config.batch_derived").observed

    @pytest.mark.parametrize("value", [True, 2.5, "8", 0, -1, [], {}])
    def test_what_is_no_size(self, value):
        assert error_codes(json.dumps({"train_batch_size": value})) == ["config.batch"]

    def test_none_given_is_a_warning(self):
        assert codes(check("{}"), Severity.WARNING) == ["config.batch"]
        assert codes(check('{"train_batch_size": "auto"}')) == ["config.value"]

    def test_unknown_world_leaves_only_what_no_world_can_fit(self):
        assert check(batch(32, 2, 8), world=None) == []
        assert error_codes(batch(33, 2, 8), world=None) == ["config.batch"]

    def test_model_parallel_ranks_are_not_data_parallel(self):
        args = ["--tensor-model-parallel-size", "2", "--pipeline_model_parallel_size=2"]
        assert errors(check(batch(32, 2, 8), args=args)) == []
        assert error_codes(batch(40, 2, 8), args=args) == ["config.batch"]
        config = {"train_batch_size": 8, MICRO: 2, "sequence_parallel_size": 2}
        assert errors(check(json.dumps(config))) == []


# Rules over several keys


class TestRules:
    def test_both_precisions(self):
        both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
        finding = only(check(both), "config.precision")
        assert finding.severity is Severity.ERROR
        assert error_codes({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}) == ["config.precision"]
        assert error_codes({**both, "fp16": {"enabled": "auto"}}) == []

    def test_master_weights_by_release(self):
        config = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
        config["zero_optimization"] = {"stage": 3}
        assert error_codes(config, version="0.18.2") == ["config.precision"]
        assert error_codes(config, version="0.18.3") == []

    def test_offload(self):
        def zero(**values):
            return {"zero_optimization": values}

        assert error_codes(zero(stage=3, offload_param={"device": "nvme"})) == ["config.offload"]
        ignored = check(zero(stage=2, offload_param={"device": "cpu"}))
        assert only(ignored, "config.offload").severity is Severity.WARNING
        assert error_codes(zero(stage=2, offload_optimizer={"ratio": 0.5})) == ["config.offload"]

    def test_old_form_of_zero(self):
        assert only(check({"zero_optimization": True}), "config.zero").severity is Severity.WARNING

    def test_elasticity(self):
        block = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [4, 2], "version": 0.1}
        text = json.dumps({"elasticity": block})
        assert error_codes(text) == ["config.elastic"]
        finding = only(check(text, version="0.18.6"), "config.elastic")
        assert "1, 2, 4" in finding.observed
        assert "4 ranks" in finding.fix
        assert errors(check(text, version="0.18.6", world=4)) == []
        beside = json.dumps({"elasticity": block, "train_batch_size": 8})
        assert error_codes(beside, version="0.18.6", world=4) == ["config.elastic"]
        newer = json.dumps({"elasticity": {**block, "version": 0.2}})
        assert codes(check(newer, version="0.18.6"), Severity.NOT_CHECKED) == ["config.elastic"]

    def test_elastic_world_sizes(self):
        # What DeepSpeed 0.14.5 and 0.19.6 say for the example in their documentation.
        sizes = elastic.world_sizes([2, 4, 6], 2000, (1, 10000), prefer_larger=True)
        assert sizes[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15]
        assert sizes[-1] == 840

    @pytest.mark.parametrize(
        "change",
        [{"micro_batch_sizes": []}, {"max_train_batch_size": 1}, {"min_gpus": 9, "max_gpus": 3}],
    )
    def test_elasticity_that_is_wrong_in_itself(self, change):
        block = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], **change}
        text = json.dumps({"elasticity": block})
        assert error_codes(text, version="0.18.6", world=None) == ["config.elastic"]


class TestArguments:
    def test_the_same_thing_said_differently(self):
        config = {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        args = ["--max_grad_norm", "0.5", "--learning-rate=1e-4", "--per_device_train_batch_size", "4"]
        found = [f for f in check(config, args=args) if f.code == "config.cli_conflict"]
        assert [f.severity for f in found] == [Severity.WARNING] * 2
        assert [MICRO in f.observed or "gradient_clipping" in f.observed for f in found] == [True, True]

    def test_auto_agrees_with_everything(self):
        args = ["--per_device_train_batch_size", "4", "--bf16", "--learning_rate", "1"]
        config = {MICRO: "auto", "bf16": {"enabled": "auto"}, "optimizer": {"params": {"lr": "auto"}}}
        assert "config.cli_conflict" not in codes(check(config, args=args))

    @pytest.mark.parametrize("args", [["--bf16"], ["--bf16", "True"], ["--bf16=true"], ["--bf16", "--x"]])
    def test_precision_flags(self, args):
        assert "config.cli_conflict" in codes(check({"bf16": {"enabled": False}}, args=args))
        assert "config.cli_conflict" in codes(check({"fp16": {"enabled": True}}, args=args))
        assert "config.cli_conflict" not in codes(check({"bf16": {"enabled": True}}, args=args))

    def test_options(self):
        assert arguments.options(["x", "--a-b", "1", "--c", "--d=", "-e", "--", "--f"]) == {
            "a_b": "1",
            "c": None,
            "d": "",
            "f": None,
        }


class TestHelpers:
    def test_base64_argument(self):
        text = json.dumps({"a": "ÿ?>"}, ensure_ascii=False).encode()
        assert ds_config.decode_argument(base64.urlsafe_b64encode(text).decode()) == text
        for other in ("ds_config.json", "train", "", "é", "ds", base64.b64encode(b"hello").decode()):
            assert ds_config.decode_argument(other) is None

    def test_offload_paths(self):
        zero = {
            "offload_param": {"device": "nvme", "nvme_path": "/a"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
        }
        assert ds_config.offload_paths({"zero_optimization": zero}) == ["/a", "/b"]
        zero["offload_optimizer"]["device"] = "cpu"
        zero["offload_param"]["nvme_path"] = "auto"
        assert ds_config.offload_paths({"zero_optimization": zero}) == []
        for odd in (None, [], {"zero_optimization": True}, {"zero_optimization": {"offload_param": 1}}):
            assert ds_config.offload_paths(odd) == []

    def test_versions(self):
        assert tables.version_of("0.16.9+cu121") == (0, 16, 9)
        assert tables.version_of("0.16.9rc1") == (0, 16, 9)
        assert tables.version_of("0.16") is None

    def test_tables_name_kinds_and_blocks_that_exist(self):
        for block in tables.blocks().values():
            for key in block.keys:
                if key.kind == "{}" and key.name != "bfloat16":
                    assert (*block.path, key.name) in tables.blocks()
                elif key.kind != "{}":
                    assert kinds.kind_of(key.kind).words
                assert key.replaced is None or key.replaced in block.in_version(tables.NEWEST)
