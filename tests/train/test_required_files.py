"""Missing files and too few devices are reported in one error, the missing model first."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config import config_files
from maxpipe.config.load import load
from maxpipe.train.session import missing_files

TUNED = [name for name, each in config_files.bundled_configs().items() if each.kind == "sft"]
BASE = ["tiny", "train.steps=1"]


@pytest.fixture(autouse=True)
def working_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TUNED)
def test_bundled_sft_configs_report_missing_base_model_and_data(name: str, working_dir: Path):
    found = missing_files(load([name], to_train=True))
    assert [each.where.rpartition(": ")[2] for each in found] == [
        "checkpoint.restore_from",
        "data.path",
    ]
    assert (
        f"{working_dir}/base does not exist. tokenizer.path=base is also read from that folder"
        in found[0].rule
    )
    assert "maxpipe fetch hf:NAME --out base" in found[0].action
    (working_dir / "base").mkdir()
    (working_dir / "chats.jsonl").touch()
    assert not missing_files(load([name], to_train=True))


@pytest.mark.parametrize("path", ["s3:/bucket/data", "S3://bucket/data", "S3:/bucket/data"])
def test_misspelled_url_of_a_store_is_corrected(path: str):
    given = [*BASE, "data.source=jsonl", f"data.path={path}"]
    [problem] = missing_files(load(given, to_train=True))
    assert problem.action.startswith("Set data.path=s3://bucket/data, ")


def test_missing_files_are_reported_before_device_count(capsys: pytest.CaptureFixture[str]):
    assert (
        main(
            [
                "train",
                "llama3-8b-sft",
                "mesh.ici_fsdp=64",
                "mesh.cpu_devices=8",
                "train.batch_size=256",
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert err.startswith(
        "shipped config llama3-8b-sft: checkpoint.restore_from = hf:base  [MP-HF-001]\n"
    )
    assert err.index("data.path = chats.jsonl") < err.index("the run needs 64, but there ")
    assert "Run on 64 accelerators, or set mesh.cpu_devices=64" in err


def test_every_file_key_is_checked(working_dir: Path):
    keys = {
        "data.source=text data.path=docs/*.txt": "data.path",
        "data.validation.b.source=jsonl data.validation.b.path=no.jsonl": "data.validation.b.path",
        "tokenizer.kind=auto tokenizer.path=t.json": "tokenizer.path",
        "eval.tasks.sums.path=sums.jsonl": "eval.tasks.sums.path",
        "eval.sample_every=1 eval.sample_prompts_file=p.txt": "eval.sample_prompts_file",
    }
    for given, key in keys.items():
        found = missing_files(load([*BASE, *given.split()]))
        assert [each.where for each in found] == [f"command line: {key}"]
    for name in ("docs/a.txt", "no.jsonl", "t.json", "sums.jsonl", "p.txt"):
        (working_dir / name).parent.mkdir(exist_ok=True)
        (working_dir / name).touch()
    assert not missing_files(load([*BASE, *" ".join(keys).split()]))


def test_resumed_run_does_not_need_restore_source(working_dir: Path):
    (working_dir / "runs/tiny/checkpoints/3").mkdir(parents=True)
    assert not missing_files(load([*BASE, "checkpoint.restore_from=hf:gone"]))


def test_bucket_paths_are_not_checked():
    given = ["data.source=text", "data.path=gs://bucket/a.txt"]
    assert not missing_files(load([*BASE, *given]))
