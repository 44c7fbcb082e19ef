"""Common errors of new users: messages state location, value and rule, and the action works.

`python tests/test_mistakes.py` prints the table with scores: 2 for a message with all four parts
whose action works, 1 for a message whose action fails, 0 otherwise.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from maxpipe.cli import main


class Mistake(NamedTuple):
    """A command with a user error, and the expected parts of its message."""

    arguments: str
    """Arguments after `maxpipe config print first/run.yml`, or a complete command after `!`."""
    where: str
    """Part of the first line of the message."""
    rule: str
    action: str
    followed: str
    """The arguments after applying the action; empty if the action is not executed."""


_NO_SECTION = "has no section"

MISTAKES = [
    Mistake(given, given.replace("=", " = ", 1), _NO_SECTION, f"Write {ours}.", ours)
    for given, ours in (
        ("base_num_decoder_layers=4", "model.num_layers=4"),
        ("base_emb_dim=64", "model.d_model=64"),
        ("base_mlp_dim=128", "model.d_mlp=128"),
        ("base_num_query_heads=16", "model.num_heads=16"),
        ("base_num_kv_heads=2", "model.num_kv_heads=2"),
        ("base_output_directory=out", "run.dir=out"),
        ("opt_type=adamw", "optim.name=adamw"),
        ("optimizer=AdamW", "optim.name=adamw"),
        ("optim=adamw_torch_fused", "optim.name=adamw"),
        ("gradient_checkpointing=true", "pipeline.remat=full"),
        ("gradient_checkpointing=false", "pipeline.remat=none"),
        ("remat_policy=minimal", "pipeline.remat=names"),
        ("lr=1e-3", "optim.learning_rate=1e-3"),
        ("max_steps=10", "train.steps=10"),
        ("steps=10", "train.steps=10"),
        ("n_layer=4", "model.num_layers=4"),
        ("hidden_size=64", "model.d_model=64"),
        ("block_size=64", "train.sequence_length=64"),
        ("max_target_length=64", "train.sequence_length=64"),
        ("seq_len=64", "train.sequence_length=64"),
        ("global_batch_size=8", "train.batch_size=8"),
        ("warmup_ratio=0.1", "optim.warmup_steps=30"),
        ("min_lr=3e-4", "optim.min_lr_ratio=0.1"),
        ("lr_scheduler_type=cosine_with_min_lr", "optim.schedule=cosine"),
        ("max_grad_norm=0.5", "optim.clip_norm=0.5"),
        ("adam_beta2=0.99", "optim.beta2=0.99"),
        ("weight_dtype=bf16", "model.param_dtype=bfloat16"),
        ("dtype=bfloat16", "model.compute_dtype=bfloat16"),
        ("use_flash_attention=true", "model.attention=auto"),
        ("attn_implementation=sdpa", "model.attention=auto"),
        ("save_steps=50", "checkpoint.every=50"),
        ("save_total_limit=2", "checkpoint.keep=2"),
        ("checkpoint_period=50", "checkpoint.every=50"),
        ("logging_steps=5", "log.every=5"),
        ("seed=3", "run.seed=3"),
        ("output_dir=out", "run.dir=out"),
        ("num_experts=4", "model.family=moe model.moe.num_experts=4"),
        ("disable_tqdm=true", "log.progress=plain"),
        ("model_name=llama-3.1-8B", "model=llama3.1-8b"),
    )
] + [
    Mistake(*row)
    for row in (
        (
            "optim.kind=adam",
            "optim.kind = adam",
            "is not a key of optim",
            "Write optim.name=adamw.",
            "optim.name=adamw",
        ),
        (
            "train.lr=1e-3",
            "train.lr = 1e-3",
            "is not a key of train",
            "Write optim.learning_rate=1e-3.",
            "optim.learning_rate=1e-3",
        ),
        (
            "trian.steps=5",
            "trian.steps = 5",
            "is not a section",
            "Write train.steps=5.",
            "train.steps=5",
        ),
        (
            "train.stpes=5",
            "train.stpes = 5",
            "is not a key of train",
            "Did you mean train.steps?",
            "train.steps=5",
        ),
        (
            "--learning_rate 1e-3",
            "--learning_rate=1e-3",
            "is not an option",
            "Write optim.learning_rate=1e-3.",
            "optim.learning_rate=1e-3",
        ),
        (
            "--training.steps 10",
            "--training.steps=10",
            "is not an option",
            "Write train.steps=10.",
            "train.steps=10",
        ),
        (
            "--job.config_file=x.toml",
            "--job.config_file=x.toml",
            "config files are positional arguments",
            "Write x.toml on the command line, without this option name.",
            "",
        ),
        (
            "x.toml",
            "x.toml",
            "5 keys from another trainer",
            "Write these lines to a .yml file",
            "x-here.yml",
        ),
        (
            "maxtext.yml",
            "maxtext.yml",
            "6 keys from another trainer",
            "Write these lines to a .yml file",
            "maxtext-here.yml",
        ),
        (
            "load_parameters_path=base",
            "load_parameters_path = base",
            "initial weights are loaded from a checkpoint",
            "Set checkpoint.restore_from=base checkpoint.restore=weights.",
            "checkpoint.restore_from=base checkpoint.restore=weights",
        ),
        (
            "dataset_type=hf data.path=saved",
            "dataset_type = hf",
            _NO_SECTION,
            "Write data.source=huggingface.",
            "data.source=huggingface data.path=saved",
        ),
        (
            "hf_path=c4",
            "hf_path = c4",
            "only `maxpipe fetch` downloads",
            "`maxpipe fetch hf:datasets/NAME --out DIR`, and set data.source and data.path=DIR.",
            "data.source=huggingface data.path=saved",
        ),
        (
            "attention=flash",
            "attention = flash",
            _NO_SECTION,
            "Set model.attention=auto,",
            "model.attention=auto",
        ),
        (
            "model.attention=flash",
            "model.attention = flash",
            "must be one of auto",
            "Set model.attention=auto,",
            "model.attention=auto",
        ),
        (
            "learning_rate=abc",
            "learning_rate = abc",
            _NO_SECTION,
            "Set optim.learning_rate=0.0003: the value must be a number.",
            "optim.learning_rate=0.0003",
        ),
        (
            "optim.learning_rate=abc",
            "optim.learning_rate = abc",
            "must be a finite number",
            "Write a value such as optim.learning_rate=0.0003.",
            "optim.learning_rate=0.0003",
        ),
        (
            "bf16=true",
            "bf16 = true",
            "types are set by name",
            "Set model.compute_dtype=bfloat16",
            "model.compute_dtype=bfloat16",
        ),
        (
            "fp16=true",
            "fp16 = true",
            "float16 is not supported",
            "Set model.compute_dtype=bfloat16",
            "model.compute_dtype=bfloat16",
        ),
        (
            "wandb_project=mine",
            "wandb_project = mine",
            "has no section",
            "Write tracker.project=mine.",
            "tracker.project=mine",
        ),
        (
            "mesh.ici_data=2 per_device_batch_size=4",
            "per_device_batch_size = 4",
            "train.batch_size is the total over all devices",
            "Write train.batch_size=8.",
            "mesh.ici_data=2 train.batch_size=8",
        ),
        (
            "!train first/run.yml data.path=nowhere",
            "data.path = nowhere",
            "is ignored with data.source=corpus",
            "data.source=text",
            "data.path=nowhere data.source=text",
        ),
        (
            "tokenizer.path=meta-llama/Llama-3.1-8B",
            "tokenizer.path = meta-llama/Llama-3.1-8B",
            "is ignored with tokenizer.kind=bytes",
            "Set tokenizer.kind=auto",
            "tokenizer.kind=auto tokenizer.path=tokenizer",
        ),
        (
            "!config print frist/run.yml",
            "frist/run.yml",
            "cannot be read",
            "Did you mean first/run.yml?",
            "!config print first/run.yml",
        ),
        (
            "!config print first/rnu.yml",
            "first/rnu.yml",
            "cannot be read",
            "Did you mean first/run.yml?",
            "!config print first/run.yml",
        ),
        (
            "!config print someone/Other-7B",
            "someone/Other-7B",
            "only `maxpipe fetch` downloads",
            "`maxpipe fetch hf:someone/Other-7B --out base`",
            "",
        ),
        (
            "!config print lama3-8b train.steps=1",
            "lama3-8b",
            "bundled config",
            "Did you mean llama3-8b?",
            "!config print llama3-8b train.steps=1",
        ),
        (
            "model=lama3-8b",
            "model = lama3-8b",
            "bundled model",
            "Write model=llama3-8b.",
            "model=llama3-8b",
        ),
        (
            "!resume mine",
            "maxpipe resume",
            "is not a command",
            "Repeat the command that started the run",
            "!train --help",
        ),
        (
            "!fit first/run.yml",
            "maxpipe fit",
            "is not a command",
            "Did you mean `maxpipe train`?",
            "!train --help",
        ),
        (
            "!data show first/run.yml data.source=jsonl data.path=texts",
            "data.path = texts",
            "must be a folder with .jsonl files",
            "Set data.source=text, which reads the files in texts.",
            "!data show first/run.yml data.source=text data.path=texts",
        ),
        (
            "!data show first/run.yml data.source=text data.path=text",
            "data.path = text",
            "must be a file, a folder or a glob pattern",
            "Did you mean data.path=texts?",
            "!data show first/run.yml data.source=text data.path=texts",
        ),
        (
            "!data show first/run.yml data.source=text data.path=nowhere",
            "data.path = nowhere",
            "must be a file, a folder or a glob pattern",
            "or use data.source=corpus data.path='' for a trial run.",
            "!data show first/run.yml data.source=corpus data.path=",
        ),
        (
            "!data show first/run.yml tokenizer.kind=auto tokenizer.path=meta-llama/Llama-3.1-8B",
            "tokenizer.path = meta-llama/Llama-3.1-8B",
            "must be a tokenizer file",
            "run `maxpipe fetch hf:meta-llama/Llama-3.1-8B --include 'tokenizer*' --out",
            "",
        ),
    )
]

ACCEPTED = [
    "--config first/run.yml",
    "--config=first/run.yml",
    "train.steps=10k",
    "train.steps=1e5",
    "train.steps=1_000",
    "train.tokens=1.5M train.steps=0",
    "model=llama-3.1-8B",
    "Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B-Instruct",
    "llama3.1-405b",
]
"""Arguments that are accepted, because their meaning is unambiguous."""

_FILES = {
    "x.toml": "[job]\ndump_folder = 'x'\n[training]\nsteps = 10\nseq_len = 64\n"
    "[optimizer]\nname = 'AdamW'\nlr = 1e-3\n",
    "maxtext.yml": "base_emb_dim: 64\nsteps: 20\nremat_policy: full\nper_device_batch_size: 2\n"
    "enable_checkpointing: true\nlearning_rate: 1.e-3\n",
    "texts/a.txt": "hello, world\n" * 50,
    "texts/b.txt": "a text of its own\n" * 50,
}


def prepare(folder: Path) -> None:
    """Write the files that the commands use to the current folder."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    run_command(["init", "first"])


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command and its combined output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(arguments)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, output.getvalue()


def command(text: str) -> list[str]:
    """Return the arguments of a command."""
    if text.startswith("!"):
        return text[1:].split()
    return ["config", "print", "first/run.yml", *text.split()]


def faults(mistake: Mistake) -> list[str]:
    """Return all defects of a message; that of a failing action starts with `action`."""
    code, message = run_command(command(mistake.arguments))
    found = [] if code == 2 and "Traceback" not in message else [f"exit code {code}"]
    found += [part for part in (mistake.where, mistake.rule, mistake.action) if part not in message]
    if mistake.action.startswith("Write these lines"):
        body = [line[4:] for line in message.split("Write these lines")[1].splitlines()[1:]]
        Path(mistake.followed).write_text("\n".join([*body, ""]))
    if mistake.followed:
        code, message = run_command(command(mistake.followed))
        found += [f"action: {message}"] if code else []
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)


@pytest.mark.usefixtures("here")
def test_messages_for_common_user_errors_suggest_working_actions():
    assert len(MISTAKES) >= 60
    wrong = {each.arguments: found for each in MISTAKES if (found := faults(each))}
    assert not wrong


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("arguments", ACCEPTED)
def test_unambiguous_arguments_are_accepted(arguments: str):
    code, message = run_command(["config", "print", "first/run.yml", *arguments.split()])
    assert code == 0, message


@pytest.mark.usefixtures("here")
def test_named_model_replaces_default_model_of_file(tmp_path: Path):
    code, message = run_command(["config", "print", "llama3-8b", "first/run.yml"])
    assert code == 0 and "  num_layers: 32\n" in message and "  vocab_size: 128256\n" in message
    assert "model: llama3-8b replaces tiny, the default model of first/run.yml\n" in message
    assert "  name: first\n" in message and "  steps: 300\n" in message
    code, message = run_command(["config", "print", "first/run.yml", "model=llama3-8b"])
    assert code == 0 and "  num_layers: 32\n" in message


@pytest.mark.usefixtures("here")
def test_file_that_overrides_named_model_is_reported(tmp_path: Path):
    Path("shape.yml").write_text(
        "model: {num_layers: 2, d_model: 64, compute_dtype: float32, num_kv_heads: 8}\n"
        "train: {steps: 5}\n"
    )
    code, message = run_command(["config", "print", "llama3-8b", "shape.yml"])
    assert code == 0 and "model: llama3-8b, 2 keys overridden by shape.yml\n" in message
    assert "overridden" not in run_command(["config", "print", "shape.yml", "llama3-8b"])[1]
    assert (
        "overridden"
        not in run_command(["config", "print", "first/run.yml", "model.num_layers=2"])[1]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare(Path(folder))
        total = 0
        for each in MISTAKES:
            problems = faults(each)
            score = 2 if not problems else 1 if problems[0].startswith("action") else 0
            total += score
            print(f"{score}  {each.arguments}")
        print(f"{total} of {2 * len(MISTAKES)}")
