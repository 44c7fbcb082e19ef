"""Sources: every format returns the same text for the same index; errors are actionable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.data import DataConfig
from maxpipe.data import sources as text_module
from maxpipe.data.formats import source as source_module
from maxpipe.data.sources import Progress, Source, open_source
from maxpipe.errors import ConfigError

TEXTS = ["first", "second é 語", "third\nwith two lines", "4th"]
GOLDEN_WORDS = ["u", "pwqjf", "zroyy"]


def write_texts(folder: Path) -> str:
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def write_json_lines(folder: Path) -> str:
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n\n".join(lines[:3]) + "\n")
    (folder / "b.jsonl").write_text("")
    (folder / "c.jsonl").write_text(lines[3])
    return str(folder)


def write_records(path: Path, records: list[bytes]) -> str:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def write_text_records(folder: Path) -> str:
    write_records(folder / "x.array_record-00000-of-00002", [t.encode() for t in TEXTS[:1]])
    write_records(folder / "x.array_record-00001-of-00002", [t.encode() for t in TEXTS[1:]])
    return str(folder)


def write_json_records(folder: Path) -> str:
    records = [json.dumps({"text": text}).encode() for text in TEXTS]
    return write_records(folder / "x.array_record", records)


PREPARE = """
import sys
import numpy as np
import tensorflow_datasets as tfds

class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"text": tfds.features.Text(), "id": np.int64}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i, text in enumerate(sys.argv[2:]):
            yield i, {"text": text, "id": i}

Tiny(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
assert "tensorflow" not in sys.modules
"""


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare a dataset in another process, so that its builder class is unknown in this one."""
    folder = tmp_path_factory.mktemp("tfds")
    script = folder / "code" / "prepare.py"
    script.parent.mkdir()
    script.write_text(PREPARE)
    data = str(folder / "data")
    subprocess.run([sys.executable, script, data, *TEXTS], check=True, capture_output=True)
    return data


def check_contract(source: Source) -> None:
    texts = [source[i] for i in range(len(source))]
    assert sorted(texts) == sorted(TEXTS)
    assert [source[i] for i in reversed(range(len(source)))] == texts[::-1]


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("text", write_texts),
        ("jsonl", write_json_lines),
        ("arrayrecord", write_text_records),
        ("arrayrecord", write_json_records),
    ],
)
def test_source_reads_folder_or_file(
    kind: Any, write: Callable[[Path], str], tmp_path: Path
) -> None:
    config = DataConfig(source=kind, path=write(tmp_path))
    source = open_source(config, seed=0)
    check_contract(source)
    assert source.name == kind
    assert open_source(config, seed=1).fingerprint() == source.fingerprint()


def test_tfds_without_tensorflow(tfds_dir: str) -> None:
    config = DataConfig(source="tfds", path="tiny:1.0.0", tfds_dir=tfds_dir)
    source = open_source(config, seed=0)
    check_contract(source)
    assert open_source(config, seed=0).fingerprint() == source.fingerprint()
    assert "tensorflow" not in sys.modules


def test_text_source_reads_glob_and_single_file(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "other.md").write_text("not matched")
    check_contract(open_source(DataConfig(source="text", path=f"{tmp_path}/*.txt"), 0))
    one = open_source(DataConfig(source="text", path=f"{tmp_path}/2.txt"), 0)
    assert [one[0]] == [TEXTS[2]] and len(one) == 1


def test_fingerprint_depends_on_content_not_path(tmp_path: Path) -> None:
    prints = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        config = DataConfig(source="jsonl", path=write_json_lines(tmp_path / name))
        prints.append(open_source(config, 0).fingerprint())
    assert prints[0] == prints[1]
    changed = tmp_path / "there" / "c.jsonl"
    changed.write_text(changed.read_text().replace("4th", "5th"))
    assert open_source(config, 0).fingerprint() != prints[0]


def test_corpus_reads_standard_library() -> None:
    source = open_source(DataConfig(), 0)
    names = [file.name for file in source.records.files]  # type: ignore[attr-defined]
    assert len(source) > 300
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    text = (Path(sysconfig.get_path("stdlib")) / "json/decoder.py").read_text(encoding="utf-8")
    assert source[names.index("json/decoder.py")] == text
    assert names == sorted(names)


def test_synthetic_text_depends_on_seed_and_index() -> None:
    a, b, other = (open_source(DataConfig(source="synthetic"), seed) for seed in (1, 1, 2))
    assert [a[i] for i in (5, 3, 8191)] == [b[i] for i in (5, 3, 8191)]
    assert a[5] != other[5] and a[5] != a[6]
    assert a.fingerprint() == b.fingerprint() != other.fingerprint()
    assert len({len(a[i]) for i in range(20)}) > 10
    # A change here changes the data of every resumed run.
    assert a[0].split()[:3] == GOLDEN_WORDS
    with pytest.raises(IndexError):
        a[len(a)]


def test_unpaired_surrogate_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert open_source(DataConfig(source="jsonl", path=str(path)), 0)[0] == "a?b"


def assert_problem(
    error: pytest.ExceptionInfo[ConfigError], where: str, given: str, text: str
) -> None:
    [problem] = error.value.problems
    assert where in problem.where
    assert given in problem.value
    assert text in problem.rule
    assert problem.action.endswith((".", '"', "]'", ")"))


@pytest.mark.parametrize("kind", ["text", "jsonl", "arrayrecord"])
def test_missing_path_is_rejected(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source=kind, path=f"{tmp_path}/none"), 0)
    assert_problem(error, "data.path", "none", "0 files")
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source=kind), 0)
    assert_problem(error, "data.path", '""', "must name a file")


def test_path_to_irregular_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nope")
    (tmp_path / "loop").symlink_to("loop")
    for path, text in (
        (tmp_path / "pipe", "; the path is not a regular file."),
        ("/dev/null", "; the path is not a regular file."),
        (tmp_path / "dangling", f"a symbolic link to {tmp_path / 'nope'}"),
        (tmp_path / "loop", "a symbolic link to loop"),
    ):
        with pytest.raises(ConfigError) as error:
            open_source(DataConfig(source="text", path=str(path)), 0)
        assert_problem(error, "data.path", str(path), text)
        assert "0 files" not in str(error.value)


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('\n{"text": "c"}\n', encoding="utf-8-sig")
    source = open_source(DataConfig(source="jsonl", path=str(tmp_path)), 0)
    assert [source[i] for i in range(len(source))] == ["a", "b", "c"]


def test_only_empty_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source="text", path=f"{tmp_path}/*.txt"), 0)
    assert_problem(error, "data.path", str(tmp_path), "1 file, all empty")
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source="jsonl", path=f"{tmp_path}/a.jsonl"), 0)
    assert_problem(error, "data.path", "a.jsonl", "1 file without lines")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "cut', "must be a JSON object: "),
        ('["text"]', "is of type list"),
        ('{"body": "b"}', "data.text_field (text), which is missing"),
        ('{"text": 3, "body": "b"}', "data.text_field (text), which is of type int"),
        (
            '{"text": "a", "n": ' + "1" * 10**6 + "}",
            "an integer of 1,000,000 digits, 111111111111..., but at most 308 digits",
        ),
    ],
)
@pytest.mark.fault("F21")
def test_invalid_json_line_is_named(line: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    source = open_source(DataConfig(source="jsonl", path=str(path)), 0)
    with pytest.raises(ConfigError) as error:
        source[1]
    assert_problem(error, f"{path}:3", "", text)
    if "body" in line:
        assert error.value.problems[0].action == "Set data.text_field=body."


def test_invalid_utf8_text_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    source = open_source(DataConfig(source="text", path=str(path)), 0)
    with pytest.raises(ConfigError) as error:
        source[0]
    assert_problem(error, str(path), "byte 0xe9 at offset 3", "must be UTF-8")


@pytest.mark.fault("F21")
def test_deleted_file_raises_error(tmp_path: Path) -> None:
    source = open_source(DataConfig(source="text", path=write_texts(tmp_path)), 0)
    os.unlink(tmp_path / "0.txt")
    with pytest.raises(ConfigError) as error:
        source[0]
    assert_problem(error, "data.path", "0.txt", "No such file")


def test_invalid_array_record_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    path.write_text("plain text")
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source="arrayrecord", path=str(path)), 0)
    assert_problem(error, "data.path", str(path), "must be ArrayRecord")


@pytest.mark.fault("F21")
def test_invalid_array_record_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [b'{"text": "a"}', b"b", b'{"body": "c"}'])
    source = open_source(DataConfig(source="arrayrecord", path=path), 0)
    assert source[0] == "a"
    with pytest.raises(ConfigError) as error:
        source[1]
    assert_problem(error, "record 1", "b", "must be a JSON object like record 0")
    with pytest.raises(ConfigError) as error:
        source[2]
    assert_problem(error, "record 2", "body", "which is missing")


def test_suggested_tfds_command_prepares_dataset(tmp_path: Path) -> None:
    script = PREPARE.partition("Tiny(data_dir")[0] + textwrap.dedent(f"""
        from maxpipe.config.schema import DataConfig
        from maxpipe.data.sources import open_source
        from maxpipe.errors import ConfigError

        config = DataConfig(source="tfds", path="tiny", tfds_dir={str(tmp_path)!r})
        try:
            open_source(config, 0)
        except ConfigError as error:
            command = error.problems[0].action.split('python -c "')[1].removesuffix('"')
        exec(command)
        print(len(open_source(config, 0)))
    """)
    file = tmp_path / "code" / "prepare.py"
    file.parent.mkdir()
    file.write_text(script)
    result = subprocess.run([sys.executable, file, "", *TEXTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == str(len(TEXTS))


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("ag_news_subse:1.0.0", "Set data.path=ag_news_subset if"),
        (
            "qqqqqqqqqqq",
            "Correct the name, or set data.tfds_dir to the parent folder of the dataset.",
        ),
        ("ag_news_subset:1.0.0", "tfds.builder('ag_news_subset:1.0.0', data_dir='"),
    ],
)
def test_unprepared_tfds_dataset_is_rejected(name: str, action: str, tfds_dir: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source="tfds", path=name, tfds_dir=tfds_dir), 0)
    assert_problem(error, "data.path", name, "must be prepared as ArrayRecord")
    assert action in error.value.problems[0].action


def test_non_text_tfds_field_is_rejected(tfds_dir: str) -> None:
    config = DataConfig(source="tfds", path="tiny:1.0.0", tfds_dir=tfds_dir, text_field="id")
    with pytest.raises(ConfigError) as error:
        open_source(config, 0)[0]
    assert_problem(error, "example 0", "fields id, text", "is of type int")


def test_tfds_without_dataset_name_is_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source="tfds"), 0)
    assert_problem(error, "data.path", '""', "must name a dataset")


def test_missing_tfds_package_suggests_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(source="tfds", path="tiny"), 0)
    assert error.value.problems[0].action == "Run: pip install tensorflow-datasets"


def test_missing_standard_library_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(text_module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError) as error:
        open_source(DataConfig(), 0)
    assert_problem(error, "data.source", "corpus", str(tmp_path))


def test_long_passes_log_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_module, "_PROGRESS_SECONDS", -1.0)
    with caplog.at_level("INFO"):
        Progress("reading", 8).update(2)
    assert caplog.messages == ["reading: 25.0 % of 8"]
