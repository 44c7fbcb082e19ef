"""Small valid inputs of every type that commands read, and the commands that read them.

A seed is a folder; its commands run inside a copy of it. Everything is made here, without
network, in less than two minutes.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.huggingface import maker

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/tokenizers"

Command = Sequence[str]
Call = Callable[..., int]
"""Runs one command in a folder, and returns its exit code."""

RUN = """
run: {name: run, dir: .}
model: {num_layers: 2, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, d_mlp: 32,
        vocab_size: 259, compute_dtype: float32}
train: {steps: 4, batch_size: 4, sequence_length: 16}
optim: {learning_rate: 1.0e-2, warmup_steps: 1}
data: {source: text, path: 'text/*.txt', validation_fraction: 0.2}
checkpoint: {every: 2, keep: 10}
eval: {every: 2, batches: 2}
log: {every: 1, trackers: []}
runtime: {platform: cpu, compilation_cache: COMPILED}
"""
CHAT = """
run: {name: chat, dir: .}
model: {num_layers: 2, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, d_mlp: 32,
        vocab_size: 1024, compute_dtype: float32}
tokenizer: {kind: auto, path: folder}
train: {steps: 2, batch_size: 4, sequence_length: 64, objective: sft}
data: {source: jsonl, path: chat.jsonl, chat: messages}
log: {trackers: []}
runtime: {platform: cpu, compilation_cache: COMPILED}
"""
_GENERATE = ("--prompt", "a b", "--max-tokens", "2", "--json")
COSTLY = {"train", "eval", "generate"}
"""Commands that compile a model."""


@dataclass(frozen=True)
class Seed:
    """A folder of valid inputs."""

    name: str
    area: str
    """Row of the results table."""
    folder: Path
    files: tuple[str, ...]
    """Patterns of the files that are mutated, relative to the folder."""
    commands: tuple[Command, ...]
    sealed: tuple[str, ...] = ()
    """Patterns of files whose every byte a `verify` command checks."""


def build(folder: Path, compiled: Path, call: Call) -> list[Seed]:
    """Make all seeds below a folder; `call` runs commands whose output is a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        *_folders(folder),
        *_tokenizers(folder),
        *_sources(folder, compiled),
        *_configs(folder, compiled),
        *_schedules(folder, call),
    ]
    found += _prepared(folder, compiled, call)
    found += _runs(folder, compiled, call)
    return found


def in_child(make: Callable[[], None]) -> None:
    """Call `make` in a child process, because libraries with threads do not survive a fork."""
    child = os.fork()
    if not child:
        try:
            make()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert not os.waitpid(child, 0)[1]


def _write_texts(folder: Path, count: int = 12) -> None:
    words = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(count):
        letters = words.choices("etaoin shrdlu", k=words.randint(40, 300))
        (folder / "text" / f"{number}.txt").write_text("".join(letters))


def _add_tokenizer(folder: Path) -> None:
    for path in (GOLDEN / "folder").iterdir():
        shutil.copy(path, folder / path.name)


# --- Hugging Face folders ---------------------------------------------------------------------


def _folders(root: Path) -> list[Seed]:
    vocab = _vocabulary()
    made = {
        "llama": (maker.llama(vocab=vocab), 1),
        "llama-sharded": (maker.llama("F32", vocab=vocab, rope_scaling=None), 3),
        "gemma3": (maker.gemma3(), 2),
        "gemma4": (maker.gemma4(), 1),
        "gemma4-small": (maker.gemma4_small(), 2),
        "mixtral": (maker.mixtral("F16"), 1),
        "llama4": (maker.llama4(), 1),
        "qwen3-next": (maker.qwen3_next(), 1),
        "granite4": (maker.granite4(), 1),
        "nemotron-h": (maker.nemotron_h(), 2),
        "kimi-linear": (maker.kimi_linear(), 2),
        "olmo-hybrid": (maker.olmo_hybrid(), 2),
        "falcon-h1": (maker.falcon_h1(), 1),
        "gpt-oss": (maker.gpt_oss(), 2),
    }
    found = []
    for name, ((config, tensors), files) in made.items():
        folder = root / f"hf-{name}"
        maker.write(folder / "model", config, tensors, files)
        if name.startswith("llama"):
            _add_tokenizer(folder / "model")
        (folder / "text.txt").write_text("Some text to count the loss of.\n" * 4)
        own = name.startswith("llama")
        tokens = () if own else ("tokenizer.kind=bytes", "tokenizer.path=")
        commands: list[Command] = [("import", "model", "--out", "imported")] * 6
        commands += [
            ("eval", "model", "--data", "text.txt", "--json", *tokens),
            ("generate", "model", *_GENERATE, "--temperature", "0", *tokens),
        ]
        found.append(Seed(f"hf-{name}", "folders", folder, ("model/*",), tuple(commands)))
    return found


def _vocabulary() -> int:
    content = json.loads((GOLDEN / "folder/tokenizer.json").read_bytes())
    ids = [*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])]
    return max(ids) + 1


# --- tokenizers ---------------------------------------------------------------------------------


def _tokenizers(root: Path) -> list[Seed]:
    found = []
    text = ("--text", "Hello, world 12345  \n語 😀")
    for name, files in {
        "folder": tuple(path.name for path in (GOLDEN / "folder").iterdir()),
        "unigram": ("unigram.model",),
        "bpe": ("bpe.model",),
        "tiktoken": ("ranks.tiktoken",),
    }.items():
        folder = root / f"tokenizer-{name}"
        folder.mkdir()
        origin = GOLDEN / "folder" if name == "folder" else GOLDEN
        for each in files:
            shutil.copy(origin / each, folder / each)
        (folder / "docs.jsonl").write_text('{"text": "one text"}\n{"text": "another 123"}\n')
        expected = json.loads((GOLDEN / "expected.json").read_bytes())
        keys: dict[str, object] = {"kind": "auto", "path": "."}
        if name == "tiktoken":
            keys |= {"split_pattern": expected["pattern"], "special_tokens": expected["control"]}
        run = {
            "model": {"vocab_size": 100_000},
            "tokenizer": keys,
            "data": {"source": "jsonl", "path": "docs.jsonl"},
            "train": {"sequence_length": 8, "steps": 1, "batch_size": 1},
        }
        (folder / "run.yml").write_text(yaml.safe_dump(run))
        commands: list[Command] = [
            ("data", "stats", "tiny", "run.yml", "--json"),
            ("data", "show", "tiny", "run.yml"),
        ]
        if name != "tiktoken":
            commands += [("tokenizer", "show", ".", *text), ("tokenizer", "show", ".", "--json")]
        found.append(Seed(f"tokenizer-{name}", "tokenizers", folder, files, tuple(commands)))
    for name, content in _made_tokenizers().items():
        folder = root / f"tokenizer-{name}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(content))
        commands = [("tokenizer", "show", ".", *text)]
        found.append(
            Seed(f"tokenizer-{name}", "tokenizers", folder, ("tokenizer.json",), tuple(commands))
        )
    return found


def _made_tokenizers() -> dict[str, dict[str, object]]:
    """Return definitions with components that the golden ones lack."""
    pieces = [["<unk>", 0.0], ["</s>", 0.0], ["▁", -2.0]]
    pieces += [[chr(97 + i), -3.0 - i / 10] for i in range(26)]
    words = {"[UNK]": 0, "</s>": 1, "hello": 2, "world": 3, "##s": 4, "1": 5, ",": 6}
    common = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **{"id": 1, "content": "</s>", "special": True, "normalized": False},
                **{"single_word": False, "lstrip": False, "rstrip": False},
            }
        ],
    }
    split = {"type": "Split", "pattern": {"Regex": r"\s+|\w+"}, "behavior": "Isolated"}
    template = {
        **{"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]},
        **{"pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}},
    }
    return {
        "replacing": {
            **common,
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "NFKC"},
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**split, "invert": False}]},
            "post_processor": template,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        },
        "words": {
            **common,
            "normalizer": {
                **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
                **{"strip_accents": None, "lowercase": True},
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": None,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                **{"type": "WordPiece", "unk_token": "[UNK]", "vocab": words},
                **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
            },
        },
    }


# --- data ---------------------------------------------------------------------------------------

_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why? naïve 語"},
    {"role": "assistant", "content": "Because."},
]


_NAMES = {
    "jsonl": "docs.jsonl",
    "gz": "docs.jsonl.gz",
    "zst": "docs.jsonl.zst",
    "parquet": "docs.parquet",
    "arrayrecord": "docs.array_record",
    "huggingface": "data-00000-of-00001.arrow",
}


def _sources(root: Path, compiled: Path) -> list[Seed]:
    in_child(lambda: _write_documents(root))
    found = []
    for kind, name in _NAMES.items():
        source = kind if kind in ("parquet", "arrayrecord", "huggingface") else "jsonl"
        path = "." if kind == "huggingface" else name
        files = (name, "state.json") if kind == "huggingface" else (name,)
        keys = (f"data.source={source}", f"data.path={path}")
        found.append(_read_by(f"data-{kind}", root, files, keys))
    _write_texts(root / "data-text", 4)
    keys = ("data.source=text", "data.path=text/*.txt")
    found.append(_read_by("data-text", root, ("text/*",), keys))
    pair = {"prompt": _TALK[:2], "chosen": _TALK[2:], "rejected": _TALK[2:]}
    for name, row in (("chat", {"messages": _TALK, "id": 7}), ("pairs", pair)):
        folder = root / f"data-{name}"
        folder.mkdir()
        shutil.copytree(GOLDEN / "folder", folder / "folder")
        (folder / "chat.jsonl").write_text((json.dumps(row) + "\n") * 8)
        text = CHAT.replace("COMPILED", str(compiled))
        if name == "pairs":
            text = text.replace("objective: sft", "objective: preference")
            text = text.replace("chat: messages", "chat: pairs, packing: best_fit")
            text = text.replace("sequence_length: 64", "sequence_length: 256")
        (folder / "chat.yml").write_text(text)
        commands: list[Command] = [
            ("data", "stats", "chat.yml", "--json"),
            ("data", "show", "chat.yml"),
            ("data", "show", "chat.yml", "-n", "2"),
        ]
        if name == "chat":
            commands.append(("data", "prepare", "chat.yml", "--out", "out", "--workers", "1"))
        files = ("chat.jsonl", "folder/*")
        found.append(Seed(f"data-{name}", "data", folder, files, tuple(commands)))
    return found


def _read_by(name: str, root: Path, files: tuple[str, ...], keys: tuple[str, ...]) -> Seed:
    base = ("tiny", "train.sequence_length=16", "train.steps=1", "train.batch_size=2", *keys)
    commands: tuple[Command, ...] = (
        ("data", "stats", *base, "--json"),
        *[("data", "show", *base)] * 2,
        ("data", "prepare", *base, "--out", "out", "--workers", "1"),
    )
    return Seed(name, "data", root / name, files, commands)


def _write_documents(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard
    from array_record.python.array_record_module import ArrayRecordWriter

    rows = [{"text": f"document {number} " * (1 + number % 7), "n": number} for number in range(30)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    paths = {kind: root / f"data-{kind}" / name for kind, name in _NAMES.items()}
    for path in paths.values():
        path.parent.mkdir()
    paths["jsonl"].write_bytes(lines)
    paths["gz"].write_bytes(gzip.compress(lines))
    paths["zst"].write_bytes(zstandard.ZstdCompressor().compress(lines))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, paths["parquet"], row_group_size=10)
    writer = ArrayRecordWriter(str(paths["arrayrecord"]), "group_size:1")
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()
    arrow = paths["huggingface"]
    with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=10)
    state = {"_data_files": [{"filename": arrow.name}]}
    (arrow.parent / "state.json").write_text(json.dumps(state))


def _prepared(root: Path, compiled: Path, call: Call) -> list[Seed]:
    folder = root / "prepared"
    folder.mkdir()
    _write_texts(folder)
    text = RUN.replace("COMPILED", str(compiled))
    (folder / "run.yml").write_text(text)
    code = call(folder, "data", "prepare", "run.yml", "--out", "tokens", "--shard-tokens", "1024")
    assert code == 0
    use = ("run.yml", "data.source=tokens", "data.path=tokens", "run.name=used")
    call(folder, "train", *use)
    shutil.rmtree(folder / "used")
    commands: tuple[Command, ...] = (
        *[("data", "verify", "tokens")] * 4,
        *[("data", "show", *use)] * 3,
        ("train", *use),
        ("data", "prepare", "run.yml", "--out", "tokens", "--shard-tokens", "1024"),
    )
    return [Seed("prepared", "prepared", folder, ("tokens/*",), commands, ("tokens/*.bin",))]


# --- configs, schedules, figures -----------------------------------------------------------------


def _configs(root: Path, compiled: Path) -> list[Seed]:
    folder = root / "configs"
    folder.mkdir()
    _write_texts(folder)
    (folder / "run.yml").write_text(RUN.replace("COMPILED", str(compiled)))
    mixture = """data:
  mixture:
    a: {source: text, path: 'text/*.txt', weight: 0.5}
    b: {source: text, path: 'text/1*.txt', weight: 2}
  validation_fraction: 0.2
"""
    line = "data: {source: text, path: 'text/*.txt', validation_fraction: 0.2}\n"
    mixed = (folder / "run.yml").read_text().replace(line, mixture)
    (folder / "mixed.yml").write_text(mixed)
    for name in ("gemma3-4b", "deepseek-v3", "tiny-moe"):
        shutil.copy(ROOT / f"configs/model/{name}.yml", folder / f"{name}.yml")
    plan = ("mesh.ici_data=-1", "--topology", "v5p:2x2x1")
    commands: list[Command] = [
        ("config", "print", "run.yml"),
        ("config", "print", "mixed.yml", "--origin"),
        ("plan", "run.yml", *plan),
        ("schedule", "run.yml"),
        ("config", "print", "gemma3-4b.yml", "train.steps=1"),
        ("config", "print", "deepseek-v3.yml", "train.steps=1"),
        ("plan", "tiny-moe.yml", "train.steps=1", "train.batch_size=8", *plan),
        ("data", "show", "mixed.yml"),
    ]
    return [Seed("configs", "configs", folder, ("*.yml",), tuple(commands))]


def _schedules(root: Path, call: Call) -> list[Seed]:
    folder = root / "schedules"
    folder.mkdir()
    shutil.copy(ROOT / "tests/golden/handwritten.csv", folder / "hand.csv")
    shape = ("--stages", "4", "--microbatches", "8")
    assert call(folder, "schedule", "zb_v", *shape, "--csv", "zb.csv") == 0
    commands = (
        ("schedule", "file:hand.csv"),
        ("schedule", "file:zb.csv"),
        ("schedule", "file:zb.csv", "--svg", "out.svg"),
    )
    figures = root / "figures"
    measured = figures / ".cache/maxpipe/hardware"
    measured.mkdir(parents=True)
    shutil.copy(ROOT / "configs/hardware/cpu.yml", measured / "cpu.yml")
    (figures / "run.yml").write_text(RUN.replace("COMPILED", "''"))
    return [
        Seed("schedules", "configs", folder, ("*.csv",), commands),
        Seed(
            "figures",
            "configs",
            figures,
            (".cache/maxpipe/hardware/*",),
            (("plan", "run.yml", "mesh.ici_data=-1", "--topology", "cpu:4"),),
        ),
    ]


# --- runs ---------------------------------------------------------------------------------------


def _runs(root: Path, compiled: Path, call: Call) -> list[Seed]:
    folder = root / "runs"
    folder.mkdir()
    _write_texts(folder)
    (folder / "run.yml").write_text(RUN.replace("COMPILED", str(compiled)))
    assert call(folder, "train", "run.yml") == 0
    checkpoints: list[Command] = [
        *[("checkpoints", "verify", "run")] * 3,
        ("checkpoints", "list", "run"),
        ("checkpoints", "show", "run"),
        ("checkpoints", "show", "run@2"),
        ("checkpoints", "diff", "run@2", "run@4"),
        ("checkpoints", "best", "run"),
        ("checkpoints", "prune", "run", "--keep", "1", "--dry-run"),
        ("export", "run", "exported"),
        ("generate", "run", *_GENERATE),
        ("eval", "run", "--json"),
        ("train", "run.yml"),
        ("train", "run.yml", "train.steps=6"),
    ]
    records: list[Command] = [
        ("curves", "run", "--out", "a.svg"),
        ("goodput", "run"),
        ("goodput", "run", "--json"),
    ]
    names = ("run/config.yml", "run/checkpoints/*", "run/checkpoints/*/**/*")
    sealed = ("run/checkpoints/*/state/**/*",)
    found = [Seed("run", "runs", folder, names, tuple(checkpoints), sealed)]
    lines = ("run/metrics.jsonl", "run/events.jsonl")
    found.append(Seed("records", "records", folder, lines, tuple(records)))
    found += _adapters(root, compiled, call)
    return found


def _adapters(root: Path, compiled: Path, call: Call) -> list[Seed]:
    folder = root / "adapters"
    vocab = _vocabulary()
    maker.write(folder / "base", *maker.llama("F32", vocab=vocab))
    _add_tokenizer(folder / "base")
    (folder / "chat.jsonl").write_text((json.dumps({"messages": _TALK}) + "\n") * 8)
    # `import` writes a config with the folder's model.
    assert call(folder, "import", "base", "--out", "imported") == 0
    overrides = (
        *("imported/config.yml", "checkpoint.restore_from=hf:base", "run.dir=.", "run.name=run"),
        *("adapter.rank=2", "train.steps=2", "train.batch_size=2", "train.objective=sft"),
        *("train.sequence_length=48", "data.source=jsonl", "data.path=chat.jsonl"),
        *("data.chat=messages",),
        *(f"runtime.compilation_cache={compiled}", "log.trackers=[]", "runtime.platform=cpu"),
    )
    assert call(folder, "train", *overrides) == 0
    names = ("base/*", "run/checkpoints/*/**/*", "run/config.yml")
    commands: tuple[Command, ...] = (
        *[("export", "run", "exported", "--adapter")] * 3,
        *[("export", "run", "exported")] * 3,
        ("checkpoints", "show", "run"),
        ("train", *overrides, "train.steps=3"),
        ("generate", "run", *_GENERATE),
    )
    return [Seed("adapters", "runs", folder, names, commands)]
