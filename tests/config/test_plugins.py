"""Plug-ins: permission, registration, errors that name their line, and entry points."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxpipe.api.plan import plan
from maxpipe.cli import main
from maxpipe.config import plugins
from maxpipe.config.load import from_dict, load, load_storage_settings, to_dict, to_yaml
from maxpipe.config.rules import BOUNDS, RULES
from maxpipe.config.schema import ALL_KEYS, KEYS, SECTIONS, without_permissions
from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.sources import open_source
from maxpipe.errors import Code, ConfigError
from maxpipe.models.registry import FAMILIES, PLUGIN_MODULES
from maxpipe.schedule.catalog import SCHEDULES
from maxpipe.step.build import objective_of
from tests.errors import assert_error, raises

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin.py"
ALLOW = "plugins.allow_code=true"
SCHEDULE = """
from maxpipe.config.plugins import register_schedule
from maxpipe.schedule import orders

register_schedule("{name}", orders.one_forward_one_backward, repeats=1)
"""


def tables() -> tuple[object, ...]:
    """Return a copy of every table that plug-ins change."""
    contents = (SECTIONS, KEYS, ALL_KEYS, BOUNDS, FAMILIES, SCHEDULES, PLUGIN_MODULES)
    return (*(dict(each) for each in contents), list(RULES))


@pytest.fixture(autouse=True)
def without_plugins() -> Iterator[None]:
    """Unload all plug-ins, and check that nothing of them is left."""
    before = tables()
    yield
    plugins.unload_plugins()
    assert tables() == before


def write_plugin(folder: Path, text: str = "", name: str = "mine") -> Path:
    path = folder / "plugin.py"
    path.write_text(text or SCHEDULE.format(name=name))
    return path


# Permission.


@pytest.mark.parametrize(
    "key", ["plugins.modules={}", "plugins.modules=[{}]", "model.module={}"], ids=str
)
def test_code_without_permission_is_not_run(key: str, tmp_path: Path) -> None:
    path = write_plugin(tmp_path, f"open({str(tmp_path / 'canary')!r}, 'w')")
    with raises(ConfigError, "plugins.modules", f"[{path}]", names=[path], suggests=ALLOW):
        load(["tiny", key.format(path)])
    assert not (tmp_path / "canary").exists()


def test_config_file_with_permission_loads_plugin(tmp_path: Path) -> None:
    path = write_plugin(tmp_path)
    file = tmp_path / "run.yml"
    file.write_text(
        f"plugins: {{modules: [{path}], allow_code: true}}\npipeline: {{schedule: mine}}\n"
    )
    loaded = load(["tiny", str(file)])
    assert loaded.config.pipeline.schedule == "mine"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert plugins.plugin_digests(loaded.config.plugins.modules) == {"plugin.py": digest}
    assert loaded.notes[0].endswith(f"(sha256 {digest[:12]}): pipeline.schedule=mine")
    assert not loaded.warnings


def test_short_form_in_file_needs_no_brackets(tmp_path: Path) -> None:
    path = write_plugin(tmp_path)
    file = tmp_path / "run.yml"
    file.write_text(f"model: {{module: {path}}}\n")
    loaded = load(["tiny", str(file), ALLOW])
    assert loaded.config.plugins.modules == [str(path)] and not loaded.warnings
    assert to_yaml(loaded.config).count("module") == 1


def test_saved_config_does_not_give_permission(tmp_path: Path) -> None:
    saved = to_dict(load(["tiny", f"plugins.modules={write_plugin(tmp_path)}", ALLOW]).config)
    plugins.unload_plugins()
    assert saved["plugins"]["allow_code"] is True
    with raises(ConfigError, "run@5: plugins.modules", names="permissions", suggests=ALLOW):
        load([], saved, "run@5")
    assert load([ALLOW], saved, "run@5").config.plugins.allow_code
    assert from_dict(saved).plugins.allow_code


def test_written_config_gives_no_permission(tmp_path: Path) -> None:
    config = load(["tiny", f"plugins.modules={write_plugin(tmp_path)}", ALLOW]).config
    kept = without_permissions(config)
    assert not kept.plugins.allow_code
    assert dataclasses.replace(kept, plugins=config.plugins) == config


def test_plugin_that_exits_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "leaving.py"
    plugin.write_text(
        "import sys\nfrom maxpipe.config.plugins import register_source\n"
        "register_source('leaving', lambda files, seed: sys.exit(0))\n"
    )
    settings = [f"plugins.modules={plugin}", ALLOW, "data.source=leaving"]
    assert main(["data", "stats", "tiny", *settings]) == 2
    assert_error(capsys.readouterr().err, str(plugin), names="SystemExit")


def test_storage_settings_run_no_code(tmp_path: Path) -> None:
    path = write_plugin(tmp_path, f"open({str(tmp_path / 'canary')!r}, 'w')")
    file = tmp_path / "config.yml"
    file.write_text(
        f"run: {{name: other}}\nmodel: {{family: mine, mine: {{a: 1}}}}\n"
        f"plugins: {{modules: [{path}], allow_code: true}}\ncheckpoint: {{dir: elsewhere}}\n"
    )
    config = load_storage_settings(str(file))
    assert (config.run.name, config.checkpoint.dir) == ("other", "elsewhere")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("record", ["events.jsonl", "metrics.jsonl", "checkpoints"])
def test_config_in_run_folder_gives_no_permission(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder, with its config.yml, may come from another person."""
    plugin = write_plugin(tmp_path, f"open({str(tmp_path / 'canary')!r}, 'w')")
    folder = tmp_path / "run"
    folder.mkdir()
    allowing = f"plugins: {{modules: [{plugin}], allow_code: true}}\n"
    (folder / "config.yml").write_text(f"model: tiny\ntrain: {{steps: 1}}\n{allowing}")
    (folder / record).mkdir() if record == "checkpoints" else (folder / record).touch()
    (tmp_path / "link.yml").symlink_to(folder / "config.yml")
    for arguments in (
        ["data", "find", str(folder), "1", "0"],
        ["train", str(folder / "config.yml")],
        ["train", str(tmp_path / "link.yml")],
    ):
        assert main(arguments) == 2
        shown = capsys.readouterr().err
        assert_error(shown, "plugins.modules", f"[{plugin}]", suggests=ALLOW)
    assert not (tmp_path / "canary").exists()


def test_only_selected_sections_need_plugins() -> None:
    saved = {
        "model": {"family": "primer"},
        "train": {"objective": "focal"},
        "plugins": {"modules": ["plugin.py"]},
    }
    for selected, needed in (("model", True), ("train", True), ("tokenizer", False)):
        sections = {selected: saved.get(selected, {}), "plugins": {}}
        found = plugins.with_needed_plugins(sections, saved)
        assert found.get("plugins", {}) == (saved["plugins"] if needed else {})
    builtin = {"model": {"family": "llama"}, "pipeline": {"schedule": "file:a.csv"}}
    assert plugins.with_needed_plugins(builtin, saved) == builtin


# Registration.


def test_example_registers_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(["examples/plugin.yml", ALLOW]).config
    chosen = config.model.family, config.train.objective, config.data.source
    assert (*chosen, config.pipeline.schedule) == ("primer", "focal", "paragraphs", "thrifty")
    assert config.model.own.branch_scale == 0.5  # pyright: ignore[reportOptionalMemberAccess]
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("setting", "key", "names"),
    [
        ("model.primer.branch_scale=-1", "model.primer.branch_scale", "100.0"),
        ("model.primer.branch_scale=x", "model.primer.branch_scale", "number"),
        ("model.primer.scale=1", "model.primer.scale", ()),
        ("model.family=llama", "model.primer.branch_scale", "primer"),
        ("train.objective_options.gamma=x", "train.objective_options.gamma", "number"),
        ("train.objective_options.gama=1", "train.objective_options", ["gama", "gamma"]),
        ("train.objective=pretrain", "train.objective_options", "pretrain"),
        ("pipeline.repeats=2", "pipeline.repeats", "thrifty"),
        ("data.source=paragraph", "data.source", "paragraphs"),
        ("data.mixture.web.source=paragraph", "data.mixture.web.source", "paragraphs"),
    ],
)
def test_invalid_value_of_plugin_is_reported(
    setting: str, key: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        load(["examples/plugin.yml", ALLOW, setting])
    assert_error(caught.value, key, names=names)


def test_values_need_their_plugin() -> None:
    for setting in ("model.family=primer", "train.objective=focal", "pipeline.schedule=thrifty"):
        with raises(ConfigError, setting.partition("=")[0]):
            load(["tiny", setting])


def test_changed_file_replaces_its_registrations(tmp_path: Path) -> None:
    path = write_plugin(tmp_path, name="first")
    load(["tiny", f"model.module={path}", ALLOW, "pipeline.schedule=first"])
    write_plugin(tmp_path, name="second")
    load(["tiny", f"model.module={path}", ALLOW, "pipeline.schedule=second"])
    assert "first" not in SCHEDULES


def test_program_may_register_without_plugin_and_again() -> None:
    for repeats in (1, 2):
        plugins.register_schedule("mine", lambda ring, count, group: [], repeats=repeats)
        assert SCHEDULES["mine"].repeats == repeats
    plugins._INTERACTIVE.undo.pop("pipeline.schedule=mine")()


@pytest.mark.parametrize(
    ("text", "line", "names"),
    [
        (SCHEDULE.format(name="1f1b"), 5, "letter"),
        (SCHEDULE.format(name="gpipe"), 5, ["gpipe", "maxpipe"]),
        ("import maxpipe.config.plugins as p\np.register_objective('sft', dict)", 2, "sft"),
        ("import maxpipe.config.plugins as p\np.register_source('text', list)", 2, "text"),
        ("a = 1\nb = a.c\n", 2, ["AttributeError"]),
        (
            "def inner():\n    raise ValueError('sad')\n\ninner()\n",
            2,
            ["ValueError", "inner", "sad"],
        ),
        ("a = 1\nb = (\n", 2, "SyntaxError"),
        ("import sys\nsys.exit(3)", 2, "SystemExit"),
        ("a = 1", None, "schedule"),
    ],
)
def test_invalid_plugin_is_reported_with_its_line(
    text: str, line: int | None, names: str, tmp_path: Path
) -> None:
    path = write_plugin(tmp_path, text)
    place = (f"{path}:{line}", None) if line else ("plugins.modules", path)
    with raises(ConfigError, *place, names=names):
        load(["tiny", f"model.module={path}", ALLOW])
    assert not plugins._loaded


def test_name_of_other_plugin_is_rejected(tmp_path: Path) -> None:
    first, second = write_plugin(tmp_path), tmp_path / "second.py"
    second.write_text(first.read_text())
    with raises(ConfigError, f"{second}:5", "pipeline.schedule=mine", names=str(first)):
        load(["tiny", f"plugins.modules=[{first},{second}]", ALLOW])


def test_family_key_without_default_is_rejected(tmp_path: Path) -> None:
    text = "import dataclasses\nfrom maxpipe.config.plugins import register_family\n"
    text += "from maxpipe.models.family import Family\n@dataclasses.dataclass(frozen=True)\n"
    text += "class Keys:\n    a: int\nregister_family(Family('mine', Keys, None))\n"
    path = write_plugin(tmp_path, text)
    with raises(ConfigError, f"{path}:7", names="Keys.a"):
        load(["tiny", f"model.module={path}", ALLOW])


@pytest.mark.parametrize("item", ["missing.py", "no such module", "no_such_module.inner"])
def test_missing_plugin_is_reported(item: str) -> None:
    with raises(ConfigError, "plugins.modules", item):
        load(["tiny", f"plugins.modules=[{item}]", ALLOW])


def test_error_in_plugin_shows_its_line_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from maxpipe.config.plugins import register_schedule\n\ndef broken(ring, count, group):\n"
    )
    text += "    return ring.missing\n\nregister_schedule('broken', broken, repeats=1)\n"
    path = write_plugin(tmp_path, text)
    arguments = ["schedule", "tiny", f"model.module={path}", ALLOW, "pipeline.schedule=broken"]
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert_error(shown, f"{path}:4", names=["AttributeError", "broken"], suggests="MAXPIPE_DEBUG=1")
    assert "Traceback" not in shown
    monkeypatch.setenv("MAXPIPE_DEBUG", "1")
    assert main(arguments) == 2
    assert "Traceback" in capsys.readouterr().err


# Entry points and modules.


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution with the entry point `waves`, which calls a function of its package."""
    package = tmp_path / "wave_schedules"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "register.py").write_text(
        "from maxpipe.config.plugins import register_schedule\n"
        "from maxpipe.schedule import orders\n"
        "\ndef register():\n"
        "    register_schedule('waves', orders.one_forward_one_backward, repeats=1)\n"
    )
    info = tmp_path / "wave_schedules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wave-schedules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[maxpipe.plugins]\nwaves = wave_schedules.register:register\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.startswith("wave_schedules")]:
        del sys.modules[name]


def test_entry_point_is_loaded_by_name(distribution: Path) -> None:
    overrides = ["plugins.modules=[waves]", "pipeline.schedule=waves"]
    with raises(ConfigError, "plugins.modules", "[waves]", suggests=ALLOW):
        load(["tiny", *overrides])
    assert "wave_schedules" not in sys.modules
    loaded = load(["tiny", *overrides, ALLOW])
    assert loaded.config.pipeline.schedule == "waves"
    (before,) = plugins.plugin_digests(["waves"]).values()
    (distribution / "helpers.py").write_text("a = 1")  # any file of the package counts
    assert plugins._digest(distribution) != before


def test_unknown_entry_point_lists_installed_ones(distribution: Path) -> None:
    with raises(ConfigError, "plugins.modules", "wavez", names="waves"):
        load(["tiny", "plugins.modules=[wavez]", ALLOW])


def test_importable_module_is_loaded(distribution: Path) -> None:
    (distribution / "direct.py").write_text(SCHEDULE.format(name="direct"))
    loaded = load(
        ["tiny", "plugins.modules=wave_schedules.direct", ALLOW, "pipeline.schedule=direct"]
    )
    assert loaded.config.pipeline.schedule == "direct"


def test_error_in_package_names_its_file(distribution: Path) -> None:
    (distribution / "register.py").write_text("import wave_schedules.inner\n")
    (distribution / "inner.py").write_text("\n1 / 0\n")
    with raises(ConfigError, f"{distribution / 'inner.py'}:2", names="ZeroDivisionError"):
        load(["tiny", "plugins.modules=waves", ALLOW])


# Data.


def test_documents_of_plugin_are_read_and_fingerprinted(tmp_path: Path) -> None:
    text = "from maxpipe.config.plugins import register_source\n"
    text += "from pathlib import Path\n"
    text += "register_source('lines', lambda files, seed: Path(files[0]).read_text().split())\n"
    load(["tiny", f"model.module={write_plugin(tmp_path, text)}", ALLOW])
    file = tmp_path / "a.txt"
    file.write_text("one two three")
    config = SourceConfig(source="lines", path=str(file))
    source = open_source(config, 0)
    assert [source[number] for number in range(len(source))] == ["one", "two", "three"]
    assert source.where(1) == "lines: document 1" and len(source.content()) == 1
    before = source.fingerprint()
    assert open_source(config, 0).fingerprint() == before != open_source(config, 1).fingerprint()
    file.write_text("one two trees")
    assert open_source(config, 0).fingerprint() != before
    file.write_text(" ")
    with raises(ConfigError, "data.source", "lines"):
        open_source(config, 0)


@pytest.mark.parametrize(
    ("documents", "kind"),
    [
        ("None", "NoneType"),
        ("(each for each in 'ab')", "generator"),
        ("'text'", "str"),
        ("5", "int"),
        ("{'a': 1}", "dict"),
    ],
)
def test_documents_without_length_and_index_are_rejected(
    documents: str, kind: str, tmp_path: Path
) -> None:
    text = "from maxpipe.config.plugins import register_source\n"
    text += f"register_source('other', lambda files, seed: {documents})\n"
    load(["tiny", f"model.module={write_plugin(tmp_path, text)}", ALLOW])
    with raises(ConfigError, "data.source", "other", names=kind, code=Code.PLUG_FAILED):
        open_source(SourceConfig(source="other"), 0)


OBJECTIVE = """
import jax.numpy as jnp
from maxpipe import Objective
from maxpipe.config.plugins import register_objective

class Mine(Objective):
    report_names = ("share",)
    def __call__(self, scores, inputs):
        loss = -scores[0]
        return {result}

register_objective("mine", {make})
"""


@pytest.mark.parametrize(
    ("result", "make", "names"),
    [
        ("loss.sum(), (loss,)", "Mine", "[]"),
        ("loss.T, (loss,)", "Mine", "[128, 8]"),
        ("loss", "Mine", "tuple"),
        ("None", "Mine", "None"),
        ("None, (loss,)", "Mine", "None"),
        ("loss, ()", "Mine", ["0", "share"]),
        ("loss, (loss.sum(),)", "Mine", "share"),
        ("loss, loss", "Mine", "metrics"),
        ("loss.astype('bfloat16'), (loss,)", "Mine", "bfloat16"),
        ("loss.astype('int32'), (loss,)", "Mine", "int32"),
        ("loss, (loss,)", "lambda: 5", "Objective"),
        ("loss, (loss,)", "lambda: None", "Objective"),
    ],
)
def test_objective_with_wrong_result_is_rejected_in_plan_and_training(
    result: str, make: str, names: str, tmp_path: Path
) -> None:
    path = write_plugin(tmp_path, OBJECTIVE.format(result=result, make=make))
    inputs = ["tiny", f"plugins.modules=[{path}]", ALLOW, "train.objective=mine"]
    inputs += ["train.sequence_length=128", "train.batch_size=8", "runtime.platform=cpu"]
    inputs += ["pipeline.microbatches=1"]
    expected = {"names": names, "code": Code.PLUG_FAILED}
    with raises(ConfigError, "train.objective", "mine", **expected):
        objective_of(load(inputs).config)
    with raises(ConfigError, "train.objective", "mine", **expected):
        plan(*inputs, topology="h100:1")


def test_objective_with_bool_metric_is_accepted_in_plan(tmp_path: Path) -> None:
    text = OBJECTIVE.format(result="loss, (loss > 1,)", make="Mine")
    inputs = ["tiny", f"plugins.modules=[{write_plugin(tmp_path, text)}]", ALLOW]
    assert plan(*inputs, "train.objective=mine", topology="h100:1").seconds > 0


@pytest.mark.parametrize("result", ["loss, undefined", "inputs['tokens'], ()"])
def test_exception_in_objective_names_line_in_plan(result: str, tmp_path: Path) -> None:
    path = write_plugin(tmp_path, OBJECTIVE.format(result=result, make="Mine"))
    inputs = ["tiny", f"plugins.modules=[{path}]", ALLOW, "train.objective=mine"]
    with raises(ConfigError, f"{path}:10", code=Code.PLUG_FAILED):
        plan(*inputs, topology="h100:1")


@pytest.mark.parametrize("kind", ["objective", "source", "schedule"])
def test_registered_object_that_is_not_callable_is_rejected(kind: str, tmp_path: Path) -> None:
    text = f"import maxpipe.config.plugins as p\np.register_{kind}('mine', 5)"
    path = write_plugin(tmp_path, text)
    with raises(ConfigError, f"{path}:2", names="int", code=Code.PLUG_REGISTER):
        load(["tiny", f"model.module={path}", ALLOW])


@pytest.mark.parametrize("documents", ["[1]", "[b'a']", "[None]"])
def test_document_of_other_type_is_rejected(documents: str, tmp_path: Path) -> None:
    text = "from maxpipe.config.plugins import register_source\n"
    text += f"register_source('other', lambda files, seed: {documents})\n"
    load(["tiny", f"model.module={write_plugin(tmp_path, text)}", ALLOW])
    with raises(ConfigError, "other: document 0"):
        open_source(SourceConfig(source="other"), 0)[0]


def test_documents_of_plugin_cannot_be_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from maxpipe.config.plugins import register_source\n"
    text += "register_source('other', lambda files, seed: ['a'])\n"
    plugin = f"model.module={write_plugin(tmp_path, text)}"
    out = str(tmp_path / "out")
    assert main(["data", "prepare", "tiny", "--out", out, plugin, ALLOW, "data.source=other"]) == 2
    assert_error(capsys.readouterr().err, "data.source", "other")


# Changed code.


def test_changed_code_is_reported_unless_allowed(tmp_path: Path) -> None:
    item = f"plugins.modules={write_plugin(tmp_path)}"
    data = {"plugins": {"plugin.py": "0" * 64}}
    loaded = load(["tiny", item, ALLOW])
    with raises(
        ConfigError,
        "plugins.modules",
        "plugin.py",
        names="0" * 12,
        suggests="plugins.allow_change=true",
    ):
        plugins.check_plugins(data, loaded, 7)
    allowed = load(["tiny", item, ALLOW, "plugins.allow_change=true"])
    (warning,) = plugins.check_plugins(data, allowed, 7)
    assert "plugin.py" in warning and "step 7" in warning
    assert not plugins.check_plugins(
        {"plugins": plugins.plugin_digests([*loaded.config.plugins.modules])}, loaded, 7
    )
    assert not plugins.check_plugins({}, loaded, 7)
