"""maxpipe runs no code from input files, writes no secrets, and opens no network connections.

docs/concepts/security.md lists the rules and the tests of each rule.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe import hardware
from maxpipe.checkpoint.manager import CheckpointManager, open_run
from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.yaml_values import MAX_FILE_BYTES
from maxpipe.data.documents import build_index
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizer import ByteTokenizer, open_tokenizer
from maxpipe.errors import ConfigError, MaxpipeError, StorageError
from maxpipe.io import files
from maxpipe.io.redact import REDACTED
from maxpipe.schedule.orders import read_orders
from maxpipe.train.session import WRITTEN_FILES
from tests.conftest import FAST_COMPILE
from tests.errors import assert_error
from tests.fork_server import ForkServer

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs/model/tiny.yml")

Capture = pytest.CaptureFixture[str]

# --- the source ---------------------------------------------------------------------------

SOURCES = sorted(
    path
    for folder in ("maxpipe", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "runpy",
}
NETWORK_MODULES = {
    "urllib",
    "http",
    "requests",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "botocore",
    "boto3",
    "aiohttp",
    "ftplib",
    "smtplib",
    "telnetlib",
}
BANNED_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
    *("torch.load", "importlib.import_module", "importlib.util.find_spec"),
}
BANNED_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}
# Modules that may open a socket: to find a free local port, or to connect the processes of a run.
SOCKETS = {
    *(f"maxpipe/distributed/{name}.py" for name in ("control_channel", "coordinator")),
    *(f"maxpipe/distributed/{name}.py" for name in ("protocol", "runtime")),
    "maxpipe/launch/local.py",
}
# Downloads models and datasets: see tests/huggingface/test_hub_client.py.
DOWNLOADS = {"maxpipe/huggingface/hub_client.py"}
# Serve arrays and metrics on the loopback interface: see tests/checkpoint/test_store_server.py and
# tests/telemetry/trackers/test_prometheus.py.
SERVERS = {"maxpipe/io/store_server.py", "maxpipe/telemetry/trackers/prometheus.py"}
# Sends alerts to the address in the user's config: see tests/telemetry/test_alerts.py.
WEBHOOKS = {"maxpipe/telemetry/alerts.py"}
# jax serializes compiled programs with pickle: see tests/step/test_executable.py.
EXECUTABLES = {"maxpipe/step/executable.py"}
# Runs plug-ins if `plugins.allow_code` is true: see tests/config/test_plugins.py.
PLUGINS = {"maxpipe/config/plugins.py"}
_RUNS_CODE = ("exec", "compile", "importlib.import_module", "importlib.util.find_spec")
# The names of the Python API are imported at first use, from modules in a fixed table.
LAZY_IMPORTS = {"maxpipe/__init__.py"}


def findings(tree: ast.Module) -> Iterator[str]:
    """Yield the imports and calls that could execute file contents or access the network."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{origin}.{alias.name}".lstrip(".") for alias in node.names]
            for name in names:
                parses_only = name.startswith("urllib.parse.")  # opens no connection
                if name.partition(".")[0] in BANNED_MODULES | NETWORK_MODULES | {"socket"} and (
                    not parses_only
                ):
                    yield f"{node.lineno}: imports {name}"
                if name in BANNED_CALLS or name.endswith("serialize_executable"):
                    yield f"{node.lineno}: imports {name}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS:
                yield f"{node.lineno}: calls {called}"
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
                yield f"{node.lineno}: {called} without allow_pickle=False"
            for name in BANNED_ARGUMENTS & given.keys():
                if given[name] != "False":
                    yield f"{node.lineno}: {name}={given[name]}"


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from pickle import loads", "import shelve as s", "import marshal"),
        *("eval('1')", "exec(text)", "compile(t, 'f', 'exec')", "__import__(name)"),
        *("os.system('ls')", "os.popen('ls')", "from os import system"),
        *("subprocess.run('ls', shell=True)", "subprocess.run('ls', shell=flag)"),
        *("yaml.load(text, Loader=yaml.Loader)", "yaml.unsafe_load(t)", "from yaml import load"),
        *("np.load(path)", "np.load(path, allow_pickle=True)", "numpy.load(path)"),
        *("importlib.import_module(config.name)", "from importlib import import_module"),
        *("import urllib.request", "from http import client", "import requests", "import socket"),
        *("from jax.experimental import serialize_executable", "load(x, trust_remote_code=True)"),
    ],
)
def test_scan_reports_unsafe_code(line: str):
    assert list(findings(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "np.load(f, allow_pickle=False)",
        "re.compile('a')",
        "yaml.safe_load(text)",
        "from urllib.parse import urlsplit",
        "subprocess.run(['ls'])",
        "model.eval()",
    ],
)
def test_scan_accepts_safe_code(line: str):
    assert not list(findings(ast.parse(line)))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_files_contain_no_unsafe_code(path: Path):
    name = path.relative_to(ROOT).as_posix()
    found = list(findings(ast.parse(path.read_text(encoding="utf-8"))))
    if name in SOCKETS:
        found = [each for each in found if not each.endswith("imports socket")]
    if name in DOWNLOADS | SERVERS | WEBHOOKS:
        found = [each for each in found if " imports " not in each]
    if name in EXECUTABLES:
        found = [each for each in found if not each.endswith("serialize_executable")]
    if name in PLUGINS:
        found = [each for each in found if not each.endswith(_RUNS_CODE)]
    if name in LAZY_IMPORTS:
        found = [each for each in found if not each.endswith("importlib.import_module")]
    assert not found, f"{name}:" + f"\n{name}:".join(found)


# --- crafted files --------------------------------------------------------------------------


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Path of a file that the crafted pickle would create when loaded; it must not exist."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists(), "code in an input file was executed"


@pytest.fixture
def crafted(canary: Path) -> bytes:
    """A pickle that creates the canary file when loaded."""
    return f"cbuiltins\nopen\n(S'{canary}'\nS'w'\ntR.".encode()


def error_of(act: Callable[[], Any]) -> str:
    with pytest.raises(MaxpipeError) as caught:
        act()
    return str(caught.value)


def test_crafted_pickle_runs_code_when_loaded(crafted: bytes, canary: Path):
    pickle.loads(crafted).close()
    assert canary.exists()
    canary.unlink()


def test_pickle_as_tokenizer_is_rejected(crafted: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(crafted)
    config = TokenizerConfig(kind="huggingface", path=str(path))
    error = error_of(lambda: open_tokenizer(config))
    assert_error(error, "tokenizer.path", path, names="tokenizer.json", suggests="tokenizer.path")


SETTINGS = ["[]", "3", "[" * 100_000, "{", '{"a": ' * 100_000, "\xff"]


@pytest.mark.parametrize("text", ["CRAFTED", *SETTINGS], ids=range(1 + len(SETTINGS)))
def test_invalid_tokenizer_settings_are_rejected(text: str, crafted: bytes, tmp_path: Path):
    import tokenizers

    words = tokenizers.models.WordLevel({"</s>": 0, "a": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    content = crafted if text == "CRAFTED" else text.encode("latin-1")
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    config = TokenizerConfig(kind="huggingface", path=str(tmp_path / "tokenizer.json"))
    assert "must be a JSON object: " in error_of(lambda: open_tokenizer(config))


@pytest.mark.parametrize("source", ["jsonl", "arrayrecord"])
def test_pickle_as_data_file_is_rejected(source: str, crafted: bytes, tmp_path: Path):
    (tmp_path / "data.jsonl").write_bytes(crafted)
    config = DataConfig(source=source, path=str(tmp_path / "data.jsonl"))  # type: ignore[arg-type]
    assert "must be" in error_of(lambda: open_source(config, 0)[0])


def test_pickle_inside_data_file_is_not_loaded(crafted: bytes, tmp_path: Path):
    """A text source reads the pickle as plain text; records and lines must be JSON objects."""
    from array_record.python.array_record_module import ArrayRecordWriter

    (tmp_path / "a.npy").write_bytes(crafted)
    text = open_source(DataConfig(source="text", path=str(tmp_path / "a.npy")), 0)
    assert text[0] == crafted.decode()
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for record in (b'{"text": "a"}', crafted, b"[" * 100_000):
        writer.write(record)
    writer.close()
    records = open_source(
        DataConfig(source="arrayrecord", path=str(tmp_path / "a.array_record")), 0
    )
    assert records[0] == "a"
    assert "must be a JSON object" in error_of(lambda: records[1])
    assert "must be a JSON object" in error_of(lambda: records[2])
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    lines = open_source(DataConfig(source="jsonl", path=str(tmp_path / "deep.jsonl")), 0)
    assert "must be a JSON object" in error_of(lambda: lines[0])


def test_pickle_in_document_index_is_not_loaded(
    crafted: bytes, canary: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An object array is stored as a pickle, so the index is rebuilt."""

    class Armed:
        def __reduce__(self) -> Any:
            return open, (str(canary), "w")

    (tmp_path / "a.txt").write_text("some text")
    source = open_source(DataConfig(source="text", path=str(tmp_path / "a.txt")), 0)
    cache = tmp_path / "index"
    right = build_index(source, ByteTokenizer(), str(cache))
    (file,) = cache.iterdir()
    lengths = np.array([Armed()], dtype=object)
    for content in (lengths, None):
        if content is None:
            file.write_bytes(crafted)
        else:
            np.savez(file, lengths=content, byte_counts=np.zeros(256, np.int64))
        found = build_index(source, ByteTokenizer(), str(cache))
        assert found.lengths.tolist() == right.lengths.tolist()
        assert "cannot be used" in caplog.messages[-1]


def test_pickle_as_schedule_or_config_is_rejected(crafted: bytes, tmp_path: Path, capsys: Capture):
    for name in ("schedule.csv", "config.yml"):
        (tmp_path / name).write_bytes(crafted)
    error_of(lambda: read_orders(tmp_path / "schedule.csv"))
    assert main(["config", "print", TINY, str(tmp_path / "config.yml")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def executable(tmp_path: Path) -> tuple[Path, Callable[[], Any]]:
    """Folder of a saved executable, and a function that loads it."""
    import jax

    from maxpipe.step import executable

    folder = tmp_path / "kept"
    compiled = jax.jit(lambda x: 2 * x).lower(jax.numpy.ones(3)).compile()
    executable.save(compiled, folder, {"program": "abc"})
    trees = jax.tree.structure(((0,), {})), jax.tree.structure(0)
    return folder, lambda: executable.load(folder, {"program": "abc"}, *trees, jax.devices()[:1])


PROVENANCES = ["[]", '{"sha256": "a", "facts": [1]}', "[" * 100_000, " " * (1 << 20) + "{}"]


@pytest.mark.parametrize("provenance", PROVENANCES, ids=range(len(PROVENANCES)))
def test_malformed_provenance_is_rejected(
    provenance: str, executable: tuple[Path, Callable[[], Any]]
):
    folder, load_it = executable
    (folder / "provenance.json").write_text(provenance)
    assert "is damaged" in error_of(load_it)


def test_pickle_as_executable_is_rejected(
    crafted: bytes, executable: tuple[Path, Callable[[], Any]]
):
    """Executables with a wrong digest, or writable by other users, are rejected."""
    import hashlib

    folder, load_it = executable
    (folder / "program.bin").write_bytes(crafted)
    assert "is damaged" in error_of(load_it)
    record = {"sha256": hashlib.sha256(crafted).hexdigest(), "facts": {"program": "abc"}}
    (folder / "provenance.json").write_text(json.dumps(record))
    for path in (folder / "program.bin", folder / "provenance.json", folder):
        mode = path.stat().st_mode
        path.chmod(mode | 0o022)
        assert "can be written by other users" in error_of(load_it)
        path.chmod(mode)
    # The permissions of the target of a symbolic link are checked.
    (folder / "program.bin").rename(folder.parent / "elsewhere")
    (folder.parent / "elsewhere").chmod(0o666)
    (folder / "program.bin").symlink_to(folder.parent / "elsewhere")
    assert "can be written by other users" in error_of(load_it)


# --- checkpoints ------------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    import jax

    params = {"embedding": jax.numpy.full((4, 8), float(step))}
    return {"step": jax.numpy.int32(step), "params": params, "optimizer": params}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder with steps 3 and 6. Tests must not change it."""
    folder = tmp_path_factory.mktemp("saved")
    with CheckpointManager(folder, CheckpointConfig(keep=5)) as checkpoints:
        for step in (3, 6):
            checkpoints.save(step, partial(state, step), {"run": {}}, {"step": step})
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def restored(folder: Path, step: int = 6) -> Any:
    with open_run(folder) as checkpoints:
        return checkpoints.restore(step).state


def test_pickle_as_checkpoint_file_is_not_loaded(crafted: bytes, copy: Path):
    good = restored(copy)["params"]["embedding"].tolist()
    noticed = 0
    for path in sorted((copy / "checkpoints" / "6").rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        path.write_bytes(crafted)
        try:
            assert restored(copy)["params"]["embedding"].tolist() == good, path
        except StorageError:
            noticed += 1
        path.write_bytes(content)
    assert noticed >= 3


def test_hostile_names_in_checkpoint_folder_are_not_followed(
    copy: Path, tmp_path: Path, capsys: Capture
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("mine")
    folder = copy / "checkpoints"
    for name in ("..%2F9", "-1", "1e3", "0x10", " 9", "9 ", "９", "a\nb", "$(touch x)", "9" * 200):
        (folder / name).mkdir()
    (folder / "7").symlink_to(outside)
    assert main(["checkpoints", "list", str(copy)]) in (0, 74)
    assert "Traceback" not in capsys.readouterr().err
    assert (outside / "keep").read_text() == "mine"


def test_symlink_among_checkpoints_is_not_followed_when_deleting(copy: Path, tmp_path: Path):
    """The link target is kept, even if the link is the oldest checkpoint and exceeds `keep`."""
    outside = tmp_path / "outside"
    shutil.copytree(copy / "checkpoints" / "3", outside)
    (copy / "checkpoints" / "2").symlink_to(outside)
    before = sorted(path.name for path in outside.rglob("*"))
    try:
        with CheckpointManager(copy, CheckpointConfig(keep=1)) as checkpoints:
            checkpoints.save(9, partial(state, 9), {"run": {}}, {"step": 9})
    except StorageError as error:
        assert "checkpoints" in str(error)
    assert sorted(path.name for path in outside.rglob("*")) == before


def test_array_names_are_not_used_as_paths(copy: Path, tmp_path: Path):
    """A leaf named ../../x does not exist."""
    metadata = copy / "checkpoints" / "6" / "state" / "_METADATA"
    text = metadata.read_text()
    assert "embedding" in text
    metadata.write_text(text.replace("embedding", "../../../../x"))
    before = sorted(tmp_path.rglob("*"))
    error_of(lambda: restored(copy))
    assert sorted(tmp_path.rglob("*")) == before


# --- run folders ------------------------------------------------------------------------------

NAMES = [
    "../../x",
    "..",
    ".",
    "",
    "/tmp/x",
    "a/b",
    "a\\b",
    "~",
    "a\nb",
    "a\0b",
    "$HOME",
    "ü",
    "a b",
]


@pytest.mark.parametrize("name", NAMES)
def test_run_name_must_be_folder_name(name: str):
    with pytest.raises(ConfigError, match="run.name"):
        load([TINY, "train.steps=1", f"run.name={name}"])


@pytest.mark.parametrize("name", ["config.yml", "metrics.jsonl", "events.jsonl"])
def test_run_does_not_write_through_symlink(name: str, tmp_path: Path):
    """A run folder from another user could contain links to any file."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(mine)
    with pytest.raises(StorageError) as caught:
        files.check_regular_files(folder, WRITTEN_FILES)
    where, rule, action = str(caught.value).splitlines()
    assert where.startswith(f"{folder / name}: is a symbolic link to {mine}")
    assert "does not follow links" in rule and action.startswith("  Remove the link")
    assert mine.read_text() == "mine"


# --- YAML and sizes ---------------------------------------------------------------------------

BOMB = "a: &a [x, x]\n" + "".join(
    f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}]\n" for i in range(9)
)
HOSTILE_YAML = {
    "alias bomb": BOMB,
    "object": "run: {name: !!python/object/apply:os.system [ls]}",
    "module": "run: !!python/module:os {}",
    "any tag": "run: {name: !mine x}",
    "merge": "run: {<<: {name: a}}",
    "deep": "run: " + "{a: " * 5000,
    "environment": "run: {name: '${oc.env:HOME}'}",
    "evaluated": "data: {path: '${oc.decode:1}'}",
    "large": "#" * (MAX_FILE_BYTES + 1),
    "many values": f"data: {{paths: [{'a,' * 100_000}]}}",
    "key of a megabyte": f"data:\n  ? {'k' * 1_000_000}\n  : 1",
    "value of a megabyte": f"data: {{source: {'k' * 1_000_000}}}",
}


@pytest.mark.parametrize("kind", HOSTILE_YAML)
def test_hostile_yaml_is_rejected(kind: str, tmp_path: Path, capsys: Capture):
    path = tmp_path / "run.yml"
    path.write_text(HOSTILE_YAML[kind])
    assert main(["config", "print", TINY, "train.steps=1", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err and str(Path.home()) not in err.replace(str(path), "")
    lines = err.rstrip("\n").splitlines()
    assert len(lines) % 3 == 0 and lines[0].startswith(str(path))
    assert len(err) < 2000


def test_command_line_key_of_100_kb_is_rejected(capsys: Capture):
    started = time.process_time()
    assert main(["config", "print", TINY, f"data.{'k' * 100_000}=1"]) == 2
    assert time.process_time() - started < 15
    assert "is not a key of data" in capsys.readouterr().err


def test_config_must_be_local_file(capsys: Capture):
    for name in ("https://host/run.yml", "gs://bucket/run.yml"):
        assert main(["config", "print", TINY, name]) == 2
        assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["alias bomb", "object", "deep", "large", "many values"])
def test_hostile_yaml_as_measured_hardware_is_rejected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "x.yml").write_text(HOSTILE_YAML[kind])
    monkeypatch.setattr(hardware, "measured_folder", lambda: tmp_path)
    hardware.known_hardware.cache_clear()
    try:
        assert "`maxpipe plan --calibrate`" in error_of(hardware.known_hardware)
    finally:
        hardware.known_hardware.cache_clear()


def test_read_enforces_maximum_file_size(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read(path, 4)


def test_oversized_tokenizer_or_schedule_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from maxpipe.data.tokenizers import files as tokenizer
    from maxpipe.schedule import orders

    path = tmp_path / "a"
    path.write_text("x" * 100)
    for module in (tokenizer, orders):
        monkeypatch.setattr(module, "_MAX_BYTES", 99)
    config = TokenizerConfig(kind="huggingface", path=str(path))
    for act in (lambda: open_tokenizer(config), lambda: read_orders(path)):
        message = error_of(act)
        assert "larger than 99 bytes" in message and message.count("\n") == 2


@pytest.mark.parametrize("name", ["huggingface:a", "ns:a", "a/b=1,c=2", "../a", "a.b", "a/../b:1"])
def test_dataset_names_load_no_code(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # importing it fails
    config = DataConfig(source="tfds", path=name)
    assert "must be name, name:version" in error_of(lambda: open_source(config, 0))


# --- mutations --------------------------------------------------------------------------------

MUTATIONS = 1000
PARTS = 8
GARBAGE = [
    *(
        "",
        "~",
        "null",
        "0",
        "-1",
        "1e400",
        "nan",
        "9" * 5000,
        "on",
        "'",
        '"',
        "[",
        "]",
        "{",
        "}",
        ":",
    ),
    *(
        "? ",
        "- ",
        "|\n",
        ">\n",
        "<<",
        "&a ",
        "*a",
        "!!int ",
        "!!python/object:x ",
        "%YAML",
        "---",
        "...",
    ),
    *(
        "${oc.env:HOME}",
        "???",
        "\0",
        "\x1b[31m",
        "\u2028",
        "\ufeff",
        "٣",
        "\t",
        "\r",
        "#",
        ",",
        "=",
        "..",
    ),
    *(
        "[[[[[[[[[[",
        "{a: {b: {c: 1}}}",
        "[1, [2]]",
        "file:/dev/null",
        "/dev/zero",
        "a\nb",
        "%s",
        "{0}",
    ),
]


def mutated(draw: random.Random, lines: list[str], keys: list[str]) -> tuple[bytes, list[str]]:
    """Return a file and overrides with up to three random changes."""
    lines, overrides = list(lines), ["train.steps=3"]
    damage = 0
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(lines))
        match draw.randrange(7):
            case 0:
                del lines[place]
                lines = lines or [""]
            case 1:
                lines[place] = f"{lines[place].partition(':')[0]}: {draw.choice(GARBAGE)}"
            case 2:
                lines.insert(place, draw.choice(lines))
            case 3:
                at = draw.randint(0, len(lines[place]))
                lines[place] = lines[place][:at] + draw.choice(GARBAGE) + lines[place][at:]
            case 4:
                overrides.append(f"{draw.choice(keys)}={draw.choice(GARBAGE)}")
            case 5:
                words = (draw.choice(keys), draw.choice(GARBAGE), "--x", "x")
                overrides.append("".join(draw.sample(words, 2)).replace("\0", ""))
            case _:
                damage += 1
    content = bytearray("\n".join(lines).encode())
    for _ in range(damage):
        at = draw.randrange(len(content) + 1)
        content[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
    return bytes(content), overrides


@pytest.mark.fault("C1")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(each, marks=pytest.mark.long) for each in range(1, PARTS))]
)
def test_mutated_configs_cause_no_traceback(part: int, tmp_path: Path, capsys: Capture):
    from maxpipe.config.schema import KEYS

    draw, count = random.Random(part), MUTATIONS // PARTS
    lines = Path(TINY).read_text(encoding="utf-8").splitlines()
    lines += [
        "mesh: {ici_stage: 2, axis_rules: {mlp: []}}",
        "pipeline:",
        "  layers_per_chunk: [4, 4]",
    ]
    lines += ["  microbatches: 2", "train: {batch_size: 8}", "optim:", "  schedule: linear"]
    path, codes = tmp_path / "run.yml", []
    for number in range(count):
        content, overrides = mutated(draw, lines, list(KEYS))
        path.write_bytes(content)
        try:
            code = main(["config", "print", str(path), *overrides])
        except SystemExit as stop:  # the arguments include --help
            code = stop.code
        err = capsys.readouterr().err
        case = f"number {number}: {overrides} {content!r}\n{err}"
        assert code in (0, 2) and "Traceback" not in err, case
        # There are no control characters, and an error has three lines, except for a translated
        # config and for arguments with line breaks.
        assert all(each.isprintable() or each == "\n" for each in err), case
        if code and "\n" not in "".join(overrides):
            translated = rf"^{re.escape(str(path))}\n.* from another trainer.*\n(  .*\n)+"
            assert re.sub(translated, "", err, flags=re.MULTILINE).count("\n") % 3 == 0, case
        codes.append(code)
    assert codes.count(0) > count / 20 and codes.count(2) > count / 3


# --- a real run ---------------------------------------------------------------------------------

TOKEN = "hf_" + "aB3dE5gH7jK9" * 3
"""A secret that is detected by its format."""
PASSWORD = "correcthorsebattery"
"""A secret that is detected by its position in a URL and by the name of its variable."""

WATCH = """
import os, sys

LOCAL = (None, "", "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1")

def watch(event, args):
    away = False
    if event in ("socket.connect", "socket.sendto"):
        away = isinstance(args[1], tuple) and args[1][0] not in LOCAL
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        away = args[0] not in LOCAL
    if away or event in ("pickle.find_class", "os.system"):
        with open(os.environ["WATCH_LOG"], "a") as log:
            log.write(f"{event} {args}\\n")
    if away:
        raise RuntimeError(f"{event}: a connection to {args} was tried")

sys.addaudithook(watch)
"""

RUN = """
model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, d_mlp: 32,
        vocab_size: 259, compute_dtype: float32}
train: {steps: 3, batch_size: 2, sequence_length: 16}
data: {source: text, validation_fraction: 0.2}
checkpoint: {every: 2}
eval: {batches: 0}
log: {every: 1}
runtime: {platform: cpu, compilation_cache: ''}
"""


class Watched:
    """Runs commands with secrets in the environment, and records all connections."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "watch.log"
        (folder / "watch").mkdir()
        (folder / "watch" / "sitecustomize.py").write_text(WATCH)
        dropped = ("JAX_", "XLA_", "PYTHONDONTWRITEBYTECODE")
        kept = {name: v for name, v in os.environ.items() if not name.startswith(dropped)}
        paths = os.pathsep.join([str(folder / "watch"), str(ROOT)])
        self.environment = kept | {"PYTHONPATH": paths, "WATCH_LOG": str(self.log)}
        self.environment |= {"HF_TOKEN": TOKEN, "TRACKER_API_KEY": PASSWORD, "JAX_NOTE": TOKEN}
        self.environment |= FAST_COMPILE

    def python(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_alone(), sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            check=False,
        )

    @cached_property
    def server(self) -> ForkServer:
        """Fork server that runs commands with the secrets and without network access."""
        return ForkServer.start(self.environment, prefix=_alone())

    def command(self, *arguments: object) -> tuple[int, str]:
        """Return the exit code and the output of a maxpipe command."""
        printed = self.folder / "printed"
        with contextlib.chdir(self.folder):
            words = [*map(str, arguments)]
            code = self.server.run(words, self.environment, printed, seconds=240)
        return code, printed.read_text()

    def connections(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@cache
def _alone() -> list[str]:
    """Return a command prefix that disables network access, or [] if unsupported."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    return [] if subprocess.run([*unshare, "true"], capture_output=True).returncode else unshare


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    watched = Watched(tmp_path_factory.mktemp("watched"))
    yield watched
    if "server" in vars(watched):
        watched.server.close()


@pytest.fixture(scope="module")
def output(watched: Watched) -> str:
    """Output of a run with secrets in its data path and thus in its command line."""
    text = watched.folder / "https:" / f"{TOKEN}:{PASSWORD}@host"
    text.mkdir(parents=True)
    words = random.Random(0)
    for number in range(20):
        letters = words.choices("etaoin shrdlu", k=words.randint(20, 400))
        (text / f"{number}.txt").write_text("".join(letters))
    (watched.folder / "run.yml").write_text(RUN)
    data = f"data.path={watched.folder}/https://{TOKEN}:{PASSWORD}@host"
    more = (f"data.tfds_dir={TOKEN}", f"checkpoint.restore_from=/x/{PASSWORD}", "run.dir=runs")
    command = ("train", "run.yml", data, *more[::2])
    code, printed = watched.command(*command)
    assert code == 0, printed
    code, again = watched.command(*command, "train.steps=4")
    assert code == 0 and "resuming" in again, again
    return printed + again


def holds_secret(content: bytes) -> bool:
    return TOKEN.encode() in content or PASSWORD.encode() in content


def test_no_secret_is_written_or_printed(watched: Watched, output: str):
    assert not holds_secret(output.encode())
    written = [path for path in (watched.folder / "runs").rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if holds_secret(path.read_bytes())]
    # Only the secrets were redacted, and the resumed run did not need them.
    config = (watched.folder / "runs/run/config.yml").read_text()
    assert f"https://{REDACTED}@host" in config
    with open_run(watched.folder / "runs/run") as checkpoints:
        facts = checkpoints.restore(4).metadata.config
        assert facts["data"]["path"].endswith(f"https://{REDACTED}@host")
        assert facts["data"]["tfds_dir"] == REDACTED and facts["model"]["d_model"] == 16
    event_files = list((watched.folder / "runs/run/tensorboard").iterdir())
    assert any(REDACTED.encode() in path.read_bytes() for path in event_files)


@pytest.mark.parametrize("more", [["data.path=MISSING"], ["checkpoint.restore_from=MISSING"]])
def test_no_secret_in_error_of_run(more: list[str], watched: Watched, output: str):
    missing = f"{watched.folder}/none/https://{TOKEN}:{PASSWORD}@host"
    options = [each.replace("MISSING", missing) for each in more]
    data = "data.source=corpus" if "data.path" not in more[0] else "log.every=1"
    code, printed = watched.command("train", "run.yml", data, "run.name=b", *options)
    assert code == 2, printed
    assert not holds_secret(printed.encode())
    assert REDACTED in printed


def test_run_fails_if_its_folder_contains_symlink(watched: Watched, output: str):
    mine = watched.folder / "mine"
    mine.write_text("mine")
    folder = watched.folder / "runs" / "linked"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to(mine)
    words = ("data.source=corpus", "run.name=linked", f"run.dir={folder.parent}")
    code, printed = watched.command("train", "run.yml", *words)
    assert code == 74 and "is a symbolic link" in printed
    assert mine.read_text() == "mine"


def test_no_secret_in_reports(watched: Watched, output: str):
    data = f"data.path={watched.folder}/https://{TOKEN}:{PASSWORD}@host"
    for command in (["env", "--json"], ["config", "print", "run.yml", data, "--origin"]):
        code, printed = watched.command(*command)
        assert code == 0 and not holds_secret(printed.encode())
        assert REDACTED in printed


def test_run_opens_no_connection_and_unpickles_nothing(watched: Watched, output: str):
    assert "done: 3 steps" in output
    assert watched.connections() == ""


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)",
        "import socket; socket.getaddrinfo('example.com', 80)",
        "import urllib.request; urllib.request.urlopen('http://192.0.2.1/')",
        "import pickle, os; pickle.loads(pickle.dumps(os.getcwd))",
    ],
)
def test_audit_hook_records_connections_and_unpickling(code: str, watched: Watched):
    ran = watched.python("-c", code)
    seen = watched.connections()
    watched.log.unlink()
    assert seen and (ran.returncode != 0) == ("pickle" not in code)
