"""`maxpipe configs` and `maxpipe init`."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config import config_files
from maxpipe.config.load import load
from maxpipe.config.render import field_docs
from maxpipe.config.schema import KEYS
from tests.errors import assert_error

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(capsys: Capture, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err and bool(out) == (code == 0)
    return out if code == 0 else err


def test_configs_list_shows_every_bundled_config(capsys: Capture):
    folders = (ROOT / "configs" / each for each in (".", "model", "sft"))
    files = [path for each in folders for path in each.glob("*.yml")]
    assert sorted(path.stem for path in files) == sorted(config_files.bundled_configs())
    lines = output_of(capsys, "configs", "list").partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(config_files.bundled_configs())
    assert all(re.fullmatch(r"\S+ +(run|model|sft) +\S.*\.", line) for line in lines)
    assert all(
        each.path.read_text() == each.text for each in config_files.bundled_configs().values()
    )


def test_config_names_differ_from_schedule_names(capsys: Capture):
    from maxpipe.schedule.catalog import SCHEDULES

    assert not set(SCHEDULES) & set(config_files.bundled_configs())
    assert output_of(capsys, "schedule", "quickstart").startswith(
        "interleaved: 4 stages x 2 repeats"
    )


def test_commands_in_config_comments_run(capsys: Capture):
    for each in config_files.bundled_configs().values():
        comment = " ".join(re.findall(r"^# ?(.*)", each.text, re.M))
        for command in re.findall(r"maxpipe (config print \S+(?: +\w+\.\w+=\S+)*)", comment):
            assert output_of(capsys, *command.split())
        assert f" {each.name}" in comment


TUNED = [name for name, each in config_files.bundled_configs().items() if each.kind == "sft"]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", TUNED)
def test_sft_configs_use_bundled_models_and_fit_in_memory(name: str, capsys: Capture):
    """The plan command in each file shows that the run fits on the devices named there."""
    text = config_files.bundled_configs()[name].text
    [command] = re.findall(r"^#   maxpipe (plan .*)", text, re.M)
    found = json.loads(output_of(capsys, *command.split(), "--json"))
    assert found["fits"] and found["total_bytes"] < 0.8 * found["memory_bytes"]
    config = load([name], to_train=True).config
    assert config.model == load([name.removesuffix("-sft"), "train.steps=1"]).config.model
    assert config.train.objective == "sft" and config.checkpoint.restore_from == "hf:base"


def test_configs_show_prints_file(capsys: Capture):
    assert (
        output_of(capsys, "configs", "show", "llama3-8b")
        == config_files.bundled_configs()["llama3-8b"].text
    )
    err = output_of(capsys, "configs", "show", "x", code=2)
    assert err.startswith("command line: x  [MP-CFG-009]\n")
    assert_error(err, "x", names=["quickstart", "deepseek-v2"], suggests="`maxpipe configs list`")
    err = output_of(capsys, "configs", "show", "llama3_8b", code=2)
    assert_error(err, "llama3_8b", names=["quickstart", "deepseek-v2"], suggests="llama3-8b")


def test_configs_copy_does_not_overwrite_files(here: Path, capsys: Capture):
    out = output_of(capsys, "configs", "copy", "quickstart")
    assert out == "wrote quickstart.yml\ntrain it: maxpipe train quickstart.yml\n"
    assert (here / "quickstart.yml").read_text() == config_files.bundled_configs()[
        "quickstart"
    ].text
    (here / "quickstart.yml").write_text("mine")
    err = output_of(capsys, "configs", "copy", "quickstart", code=2)
    assert err.startswith("quickstart.yml  [MP-CLI-004]\n")
    assert_error(
        err, "quickstart.yml", names="exists", suggests=["quickstart-2.yml", "--overwrite"]
    )
    assert "quickstart-2.yml, or add --overwrite" in err
    assert (here / "quickstart.yml").read_text() == "mine"
    output_of(capsys, "configs", "copy", "quickstart", "--overwrite")
    assert (here / "quickstart.yml").read_text() != "mine"


def test_configs_copy_uses_given_name(here: Path, capsys: Capture):
    (here / "folder").mkdir()
    output_of(capsys, "configs", "copy", "tiny", "mine.yaml")
    output_of(capsys, "configs", "copy", "tiny", "folder")
    assert (here / "mine.yaml").read_text() == (here / "folder/tiny.yml").read_text()
    assert load(["mine.yaml", "train.steps=1"]).config.run.name == "mine"
    err = output_of(capsys, "configs", "copy", "tiny", "mine", code=2)
    assert_error(err, "FILE", "mine", names=[".yml", ".yaml"], suggests="mine.yml")
    output_of(capsys, "configs", "copy", "tiny", "x" * 300 + ".yml", code=74)
    output_of(capsys, "configs", "copy", "tiny", "a\nb.yml", code=2)
    assert "cannot be written" in output_of(capsys, "configs", "copy", "tiny", "no/a.yml", code=74)


def test_configs_copy_does_not_follow_symlink(here: Path, capsys: Capture):
    (here / "tiny.yml").symlink_to(here / "elsewhere.yml")
    output_of(capsys, "configs", "copy", "tiny", code=2)
    output_of(capsys, "configs", "copy", "tiny", "--overwrite")
    assert not (here / "elsewhere.yml").exists() and not (here / "tiny.yml").is_symlink()


def test_init_writes_commented_config_named_after_folder(here: Path, capsys: Capture):
    out = output_of(capsys, "init", "my first")
    assert "train it: maxpipe train 'my first/run.yml'" in out
    text = (here / "my first/run.yml").read_text()
    assert "\n#   maxpipe train 'my first/run.yml'  " in text
    loaded = load([str(here / "my first/run.yml")], to_train=True)
    assert loaded.config.run.name == "my-first"
    mentioned = [key for key in KEYS if loaded.origins[key].endswith("run.yml")]
    words = " ".join(re.sub(r"(?m)^ *# ?", "", text).split())
    assert len(mentioned) > 15 and all(field_docs()[key] in words for key in mentioned)
    assert max(map(len, text.splitlines())) <= 100


def test_init_does_not_overwrite_files(here: Path, capsys: Capture):
    output_of(capsys, "init", "first")
    (here / "first/run.yml").write_text("mine")
    err = output_of(capsys, "init", "first", code=2)
    assert_error(err, "first/run.yml", names="exists", suggests="maxpipe train first/run.yml")
    assert (here / "first/run.yml").read_text() == "mine"
    (here / "file").touch()
    assert "is a file" in output_of(capsys, "init", "file", code=2)
    output_of(capsys, "init", "file/below", code=74)
    output_of(capsys, "init", "x" * 300, code=74)
    for name in ("", "a\nb: c", "\udcff"):
        assert "printable" in output_of(capsys, "init", name, code=2)
    os.chdir(here / "first")
    output_of(capsys, "init", "../second/third")
    assert load(["../second/third/run.yml"]).config.run.name == "third"


def test_full_disk_leaves_no_partial_config(here: Path, capsys: Capture):
    (here / "old.yml").write_text("mine")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for command in (
            ["configs", "copy", "quickstart"],
            ["configs", "copy", "quickstart", "old.yml", "--overwrite"],
            ["init", "folder"],
        ):
            assert "File too large" in output_of(capsys, *command, code=74)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(here.rglob("*")) == [here / "folder", here / "old.yml"]
    assert (here / "old.yml").read_text() == "mine"
