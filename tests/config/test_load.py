from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from maxpipe.config.load import from_dict, load, to_dict, to_yaml
from maxpipe.config.schema import KEYS, flatten, sections_of, upgrade_config
from maxpipe.config.yaml_values import MAX_FILE_BYTES
from maxpipe.errors import ConfigError
from tests.errors import assert_error, raises, without_codes

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs/model/tiny.yml")
VALID = [TINY, "train.steps=10"]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(text)`: write a config file with this text and return its path."""

    def write(text: str, name: str = "run.yml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems(*args: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(args)
    return [str(problem) for problem in caught.value.problems]


def only_problem(*args: str) -> str:
    found = problems(*args)
    assert len(found) == 1, "\n".join(found)
    where, rule, action = found[0].split("\n")
    assert rule.startswith("  ") and rule.endswith(".")
    assert action.startswith("  ") and action[-1] in ".?"
    assert where == where.strip()
    return found[0]


# --- merging and origins ---------------------------------------------------------


def test_files_merge_left_to_right_and_overrides_win(write: Write):
    first = write("train:\n  steps: 5\n  batch_size: 4\n", "a.yml")
    second = write("train:\n  steps: 6\nrun:\n  name: b\n", "b.yaml")
    loaded = load(["run.name=c", TINY, first, second])
    assert (loaded.config.train.steps, loaded.config.train.batch_size) == (6, 4)
    assert loaded.config.run.name == "c"
    assert loaded.origins["train.steps"] == second
    assert loaded.origins["train.batch_size"] == first
    assert loaded.origins["run.name"] == "run.name=c"
    assert loaded.origins["model.num_layers"] == TINY
    assert loaded.origins["optim.beta1"] == "default"
    assert set(KEYS) <= set(loaded.origins)


def test_repeated_file_overrides_earlier_files(write: Write):
    first, second = write("train: {steps: 5}", "a.yml"), write("train: {steps: 6}", "b.yml")
    assert load([TINY, first, second, first]).config.train.steps == 5


def test_last_override_wins():
    assert load([*VALID, "train.steps=11", "train.steps=12"]).config.train.steps == 12


def test_path_may_contain_equals_sign(tmp_path: Path, write: Write):
    folder = tmp_path / "lr=3"
    folder.mkdir()
    (folder / "run.yml").write_text("train: {steps: 3}")
    assert load([TINY, str(folder / "run.yml")]).config.train.steps == 3


def test_override_replaces_invalid_value_of_file(write: Write):
    path = write("optim: {schedule: foo}\ntrain: {steps: many}\n")
    loaded = load(["tiny", path, "train.steps=7", "optim.schedule=cosine"])
    assert (loaded.config.optim.schedule, loaded.config.train.steps) == ("cosine", 7)
    with raises(ConfigError, "optim.schedule", "foo", suggests="optim.schedule=cosine"):
        load(["tiny", path, "train.steps=7"])
    with raises(ConfigError, "train.steps", "none", names="integer"):
        load(["tiny", path, "train.steps=none", "optim.schedule=cosine"])


def test_axis_rules_merge_by_entry_and_full_override_replaces(write: Write):
    file = write("mesh:\n  axis_rules: {mlp: [], embed: []}\ntrain: {steps: 1}\n")
    both = load([TINY, file, "mesh.axis_rules.heads=[]"])
    assert both.config.mesh.axis_rules == {"mlp": [], "embed": [], "heads": []}
    assert both.origins["mesh.axis_rules.mlp"] == file
    assert both.origins["mesh.axis_rules.heads"] == "mesh.axis_rules.heads=[]"
    one = load([TINY, file, "mesh.axis_rules={heads: [tensor]}"])
    assert one.config.mesh.axis_rules == {"heads": ["tensor"]}
    assert load([TINY, file, "mesh.axis_rules={}"]).config.mesh.axis_rules == {}


def test_empty_section_or_commented_file_is_accepted(write: Write):
    assert load([*VALID, write("train:\n"), write("# nothing\n", "b.yml")]).config.train.steps == 10


@pytest.mark.fault("L7")
def test_empty_file_is_rejected(write: Write):
    empty = write("\n")
    with pytest.raises(ConfigError) as caught:
        load([*VALID, empty])
    assert f"{empty}\n  is empty" in without_codes(caught.value)


# --- parsing of values ---------------------------------------------------------------


@pytest.mark.parametrize("text", ["on", "no", "007", "1_000", "1e3", "null", "2024-01-01", "~x"])
def test_strings_are_loaded_verbatim(text: str, write: Write):
    assert load([*VALID, f"data.path={text}"]).config.data.path == text
    if text != "null":
        assert load([*VALID, write(f"data: {{path: {text}}}")]).config.data.path == text


def test_override_may_set_empty_string(write: Write):
    assert load([*VALID, write("data: {path: x}"), "data.path="]).config.data.path == ""


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000), ("1_000", 1000), ("8.0", 8), ("+8", 8), (" 8 ", 8)]
)
def test_integer_formats(text: str, value: int):
    steps = load([*VALID, f"train.steps={text}"]).config.train.steps
    assert steps == value and type(steps) is int


def test_large_integers_are_exact():
    tokens = load([*VALID, f"train.tokens={2**59 + 1}"]).config.train.tokens
    assert tokens == 2**59 + 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "1e30",
        "9" * 30,
        "9" * 6000,
        "0x10",
        "1__0",
        "१",
        "[1]",
    ],
)
def test_invalid_integers_are_rejected(text: str):
    message = only_problem(*VALID, f"train.steps={text}")
    assert_error(message, "train.steps", names="integer", suggests="train.steps=100")
    assert len(message) < 300


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (str(2**63), "from -2**63 to 2**63 - 1"),
        (f"-{'9' * 6000}", "from -2**63 to 2**63 - 1"),
        ("1e19", "from -2**63 to 2**63 - 1"),
        ("1e16", "without a decimal point or exponent"),
    ],
)
def test_integers_beyond_64_bits_are_rejected(text: str, rule: str):
    message = only_problem(*VALID, f"train.tokens={text}")
    assert_error(message, "train.tokens", names=["integer", rule])


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("3", 3.0), ("1_0.5", 10.5)])
def test_float_formats(text: str, value: float, write: Write):
    rate = load([*VALID, f"optim.learning_rate={text}"]).config.optim.learning_rate
    assert rate == value and type(rate) is float
    file = write(f"optim: {{learning_rate: {text}}}")
    assert load([*VALID, file]).config.optim.learning_rate == value


@pytest.mark.parametrize("text", ["nan", ".inf", "-inf", "true", "a", "", "१"])
def test_invalid_floats_are_rejected(text: str):
    message = only_problem(*VALID, f"optim.beta1={text}")
    assert_error(message, "optim.beta1", names="finite number", suggests="optim.beta1=0.9")


@pytest.mark.parametrize(("text", "value"), [("on", True), ("False", False), ("0", False)])
def test_boolean_formats(text: str, value: bool):
    assert load([*VALID, f"mesh.sequence_parallel={text}"]).config.mesh.sequence_parallel is value


@pytest.mark.parametrize("text", ["2", "maybe", ""])
def test_invalid_booleans_are_rejected(text: str):
    message = only_problem(*VALID, f"mesh.sequence_parallel={text}")
    names, suggestion = ["true", "false"], "mesh.sequence_parallel=true"
    assert_error(message, "mesh.sequence_parallel", names=names, suggests=suggestion)


@pytest.mark.parametrize(("text", "trackers"), [("true", ["tensorboard"]), ("off", [])])
def test_former_tensorboard_switch(text: str, trackers: list[str], write: Write):
    """`log.tensorboard` of earlier releases is accepted with a warning that names the new key."""
    for argument in (f"log.tensorboard={text}", write(f"log: {{tensorboard: {text}}}")):
        loaded = load([*VALID, argument])
        assert loaded.config.log.trackers == trackers
        [warning] = loaded.warnings
        assert f"log.trackers={'[tensorboard]' if trackers else '[]'}" in warning.line or (
            f"trackers: {'[tensorboard]' if trackers else '[]'}" in warning.line
        )
    saved = {"log": {"tensorboard": bool(trackers)}}
    assert upgrade_config(saved) == {"log": {"trackers": trackers}}


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("model:\n  num_layer: 3", 2, "Did you mean model.num_layers?"),
        ("modle:\n  num_layers: 3", 1, "Did you mean model?"),
        ("num_layers: 3", 1, "Write `num_layers: 3` below `model:`."),
        ("optim:\n  steps: 3", 2, "Write `steps: 3` below `train:`."),
        ("model.num_layers: 3", 1, "Write `model:`, and `num_layers: ...` indented below it"),
        ("model.moe.num_experts: 3", 1, "`model:`, below it `moe:`, and `num_experts: ...`"),
        ("model:\n  moe.num_experts: 3", 2, "is a full key"),
        ("train: 3", 1, "is a section"),
        ("train: [3]", 1, "is a section"),
        ("train:\n  steps: 1\n  steps: 2", 3, "appears twice in this file, first on line 2"),
        ("train: {}\nrun: {}\ntrain: {}", 3, "appears twice in this file, first on line 1"),
        ("mesh:\n  axis_rules:\n    mlp: []\n    mlp: []", 4, "appears twice"),
        ("train:\n  batch_size: {a: 1}", 2, "must be an integer"),
        ("train:\n  batch_size:", 2, "must be an integer"),
        ("train:\n  ? [a]\n  : 1", 2, "is not a key of train"),
        ("run:\n  name: ~", 2, "must be a string"),
        ("run:\n  name: [a]", 2, "must be a string"),
        ("run:\n  name: ${oc.env:HOME}", 2, "variables are not expanded"),
        ('data:\n  path: "a\\0b"', 2, "NUL character"),
        ("run:\n  name: ???", 2, "missing value"),
        ("optim:\n  schedule: cosin", 2, "Set optim.schedule=cosine."),
        ("mesh:\n  axis_rules: 3", 2, "must be a mapping"),
        ("mesh:\n  axis_rules: {mlp: tensor}", 2, "must be a list of mesh axes"),
        ("mesh:\n  axis_rules: {mlp: [[tensor]]}", 2, "must be a list of mesh axes"),
        ("mesh:\n  axis_rules: {mlp: [~]}", 2, "must be a list of mesh axes"),
    ],
)
def test_error_in_file_names_file_and_line(text: str, line: int, message: str, write: Write):
    file = write(text)
    problem = only_problem(*VALID, file)
    assert problem.startswith(f"{file}:{line}: ")
    assert message in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  name: 'a", ":2:11"),
        ("run: {", "YAML"),
        ("run:\n\tname: a", ":2:1"),
        ("- a\n- b", "must contain sections"),
        ("just text", "must contain sections"),
        ("run: {}\n---\ntrain: {}", "expected a single document"),
        ("a: &x {}\nb: *x", "anchors and aliases are not supported"),
        ("run:\n  name: !!python/object/apply:os.system [ls]", "tags such as"),
        ("[" * 100_000, "nested deeper"),
        ("run: \x01", "YAML"),
    ],
)
def test_unsupported_yaml_is_rejected(text: str, message: str, write: Write):
    file = write(text)
    problem = only_problem(*VALID, file)
    assert problem.startswith(file)
    assert message in problem


@pytest.mark.parametrize(
    ("value", "action"),
    [
        ("[*.experts.gate]", """Write 'model.frozen=["*.experts.gate"]': """),
        ("[embedding,*norm]", """Write 'model.frozen=[embedding,"*norm"]': """),
        ("[a", "Write the value as in 'model.frozen=[a,b]'."),
    ],
)
def test_invalid_list_on_the_command_line_names_an_override_that_works(value: str, action: str):
    assert action in only_problem(*VALID, f"model.frozen={value}")


def test_invalid_mapping_on_the_command_line_names_the_form_of_a_mapping():
    problem = only_problem(*VALID, "mesh.axis_rules={mlp: [}")
    assert "Write the value as in 'mesh.axis_rules={a: 1}'." in problem


def test_unquoted_pattern_in_file_names_the_quotes(write: Write):
    file = write("model:\n  frozen: [*.experts.gate]")
    assert "Put text that begins with * in quotes" in only_problem(*VALID, file)


def test_unreadable_files_are_rejected(tmp_path: Path, write: Write):
    file = write("train: {steps: 1}", "quickstart.yml")
    assert f"Did you mean {file}?" in only_problem(TINY, file.replace("start", "strt"))
    assert "does not exist" in only_problem(TINY, str(tmp_path / "no/a.yml"))
    (tmp_path / "folder.yml").mkdir()
    assert "cannot be read" in only_problem(TINY, str(tmp_path / "folder.yml"))
    (tmp_path / "latin.yml").write_bytes(b"run: {name: caf\xe9}")
    assert "is not UTF-8 text: byte 15 is 0xe9" in only_problem(TINY, str(tmp_path / "latin.yml"))
    large = write("#" * (MAX_FILE_BYTES + 1), "large.yml")
    assert f"larger than {MAX_FILE_BYTES} bytes" in only_problem(TINY, large)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--train.steps=5", "Write train.steps=5."),
        ("--fast", "is not an option"),
        ("steps=5", "Write train.steps=5."),
        ("nowhere=5", "Write section.key=value."),
        ("=5", "has no section"),
        (".=5", "has no section"),
        ("train.=5", "has no section"),
        ("train.steps.x=5", "is not a key of train"),
        ("train.stesp=5", "Did you mean train.steps?"),
        ("trian.steps=5", "Write train.steps=5."),
        ("mesh.axis_rules={mlp: [", "YAML"),
        ("mesh.axis_rules=mlp", "must be a mapping"),
        ("mesh.axis_rules.mlp=tensor", "must be a list of mesh axes"),
        ("data.path=${HOME}/x", "variables are not expanded"),
        ("data.path=\udc80", "is not Unicode text"),
    ],
)
def test_error_in_override_names_command_line(arg: str, message: str):
    problem = only_problem(*VALID, arg)
    assert problem.startswith("command line: ")
    assert message in problem


@pytest.mark.parametrize("arg", ["train.steps", "configs", "", str(ROOT / "README"), "a.yml.txt"])
def test_argument_that_is_neither_file_nor_override_is_rejected(arg: str):
    problem = only_problem(*VALID, arg)
    assert problem.startswith(f"command line: {arg or 'empty argument'}")


def test_missing_keys_are_reported_together():
    problem = only_problem("train.steps=1", "model.num_layers=2")
    assert problem.startswith("command line: model.d_model, model.num_heads, ")
    assert "num_layers" not in problem.split("\n")[0]
    assert "Specify a model first, such as tiny" in problem


def test_all_errors_are_reported_at_once(write: Write):
    file = write("train: {stesp: 1}\nmodel: {num_heads: 5, d_mlp: x}\n")
    found = problems(TINY, file, "steps=3", str(Path(file).parent / "no.yml"), "optim.beta1=1.5")
    text = "\n".join(found)
    keys = ["no.yml", "steps = 3", "train.stesp", "model.d_mlp = x", "beta1 = 1.5", "num_heads = 5"]
    assert all(key in text for key in keys)
    assert len(found) == 6


def test_rules_on_invalid_keys_are_skipped(write: Write):
    assert "num_kv_heads = x" in only_problem(*VALID, "model.num_kv_heads=x")
    assert "num_kv_heads = 0" in only_problem(*VALID, "model.num_kv_heads=0")


def test_unreadable_file_suppresses_missing_key_errors(tmp_path: Path):
    assert "cannot be read" in only_problem(str(tmp_path / "no.yml"))


def test_number_of_reported_errors_is_limited(write: Write):
    found = problems(TINY, write("\n".join(f"k{i}: 1" for i in range(1000))))
    assert len(found) <= 101
    assert "900 more values were not read" in found[-1]


# --- dicts and files from a config ------------------------------------------------------


def test_dict_round_trip():
    config = load(VALID).config
    assert from_dict(to_dict(config)) == config
    given = {name: to_dict(config)[name] for name in ("run", "model")}
    assert from_dict({**given, "train": {"steps": 10}}) == config


def test_from_dict_reports_errors_by_key():
    with pytest.raises(ConfigError) as caught:
        from_dict({"model": 3, "trian": {}, "train": {"steps": None}, "run": {"seed": True}})
    text = str(caught.value)
    for where in ("model = 3", "trian", "train.steps = null", "run.seed = true"):
        assert f"from_dict: {where}" in text


def test_to_yaml_is_complete_and_deterministic():
    config = load([*VALID, "mesh.axis_rules.mlp=[]"]).config
    text = to_yaml(config)
    assert text == to_yaml(dataclasses.replace(config))
    assert text.count("\n") == len(flatten(to_dict(config))) + len(sections_of(config))
    assert "  axis_rules: {mlp: []}\n" in text


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30).filter(
    lambda text: not ("${" in text or "\0" in text or text.lstrip("\\") == "???")
)
RATES = st.floats(min_value=1e-30, max_value=3.4e38)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(path="a\n b", folder="\x85\u2028\ufeff", rate=1.0, seed=0, log=True)
@given(path=TEXT, folder=TEXT, rate=RATES, seed=st.integers(0, 2**32 - 1), log=st.booleans())
def test_to_yaml_round_trip(
    path: str, folder: str, rate: float, seed: int, log: bool, write: Write
):
    values = to_dict(load(VALID).config)
    values["data"] |= {"path": path, "tfds_dir": folder}
    values["optim"]["learning_rate"] = rate
    values["run"]["seed"] = seed
    values["mesh"]["sequence_parallel"] = log
    config = from_dict(values)
    assert config.data.path == path and config.optim.learning_rate == rate
    assert load([write(to_yaml(config))]).config == config


SNIPPETS = [*"[]{}:#'~\n\x00\ufeff", '"', "model", "-1", "on", "nan", "1e999", "???", "${x}"]
WORDS = st.sampled_from(
    [*KEYS, *SNIPPETS, ": ", "\n  ", "- ", "? ", "|\n", "<<", "&a", "*a", "!!int "]
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_config_raises_only_config_errors(data: st.DataObject, write: Write):
    text = to_yaml(load(VALID).config)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.integers(0, 12))
        text = text[:start] + data.draw(WORDS | st.text(max_size=4)) + text[end:]
    path = Path(write(""))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load([str(path)])
    except ConfigError as error:
        assert error.problems


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(list(KEYS)), WORDS | st.text(max_size=6)), max_size=4))
def test_random_overrides_raise_only_config_errors(overrides: list[tuple[str, str]]):
    try:
        load([*VALID, *(f"{key}={value}" for key, value in overrides)])
    except ConfigError as error:
        assert error.problems
