"""Fine-tuning on conversations: loss and gradients equal those of transformers and torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.data.loader import build_single_pass
from maxpipe.huggingface.folder import open_folder
from maxpipe.parallel.mesh import build_mesh
from maxpipe.restore.initial_weights import read_folder_params
from maxpipe.step.build import steps_from_config
from tests.conftest import FAST_COMPILE
from tests.data.conversations import (
    CHATML,
    CONVERSATIONS,
    make_tokenizer,
    messages_of,
    write_records,
)
from tests.huggingface.test_finetune import logits as _logits
from tests.huggingface.test_oracle import PYTHON, job_of, reason, run_oracle, use_fixed_frequencies
from tests.huggingface.test_oracle_runs import close

pytestmark = pytest.mark.oracle

ROWS, TOKENS, VOCAB = 8, 96, 407
FAMILIES = ("llama", "gemma3", "qwen2")
LAYOUTS = {
    "one": [],
    "stages": ["mesh.ici_stage=4", "mesh.ici_fsdp=2", "pipeline.microbatches=4"],
    "tensor": [
        *("mesh.ici_stage=2", "mesh.ici_tensor=2", "pipeline.microbatches=2"),
        *("pipeline.schedule=zb_h1", "mesh.axis_rules={kv_heads: [], heads: [], mlp: []}"),
    ],
}
RECORDS = [
    *CONVERSATIONS,
    *(messages_of(("user", f"Count to {n}."), ("assistant", "word " * n)) for n in (1, 2, 7, 19)),
    messages_of(("user", "Say much to me, and hear little " * 3), ("assistant", "No")),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Jobs by family, each with a float32 folder and torch's loss and gradients."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base = tmp_path_factory.mktemp("sft")
    tokenizer = make_tokenizer(base / "tokenizer", CHATML)
    write_records(base / "chats.jsonl", [{"messages": each} for each in RECORDS])
    (base / "chats.json").write_text(json.dumps(RECORDS))
    found = {
        kind: {
            **job_of(kind, 0, base, num_hidden_layers=4, vocab_size=VOCAB),
            "tokenizer": str(tokenizer),
            "documents": str(base / "chats.json"),
            "gradients": str(base / f"{kind}-gradients"),
            "found": str(base / f"{kind}-loss.json"),
        }
        for kind in FAMILIES
    }
    for job in found.values():
        use_fixed_frequencies(job["config"])
    run_oracle("make", [*found.values()], base)
    run_oracle("sft", [*found.values()], base)
    return found


def config_of(job: dict[str, Any], layout: str) -> Config:
    base = Path(job["tokenizer"]).parent
    known = {
        "model": {**open_folder(job["folder"]).description.section, "compute_dtype": "float32"},
        "train": {"objective": "sft", "steps": 1, "batch_size": ROWS, "sequence_length": TOKENS},
        "data": {
            **{"source": "jsonl", "path": str(base / "chats.jsonl"), "chat": "messages"},
            **{"packing": "best_fit", "validation_fraction": 0.0},
        },
        "eval": {"batches": 0},
        "tokenizer": {"kind": "huggingface", "path": job["tokenizer"]},
    }
    return load(LAYOUTS[layout], known, "test", to_train=True).config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_gradients_equal_torch(kind: str, layout: str, jobs) -> None:
    job, config = jobs[kind], config_of(jobs[kind], layout)
    loader, tokenizer = build_single_pass(
        config.data,
        config.tokenizer,
        "all",
        seed=0,
        batch_size=ROWS,
        sequence_length=TOKENS,
    )
    assert loader.num_batches == 1
    batch = loader.batch(0)
    assert batch["segment_ids"].max() > 1  # conversations share rows
    count = {"one": 1, "stages": 8, "tensor": 4}[layout]
    mesh = build_mesh(config.mesh, jax.devices()[:count])
    wanted, trained = json.loads(Path(job["found"]).read_text())
    assert batch["loss_mask"].sum() == trained
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        steps = steps_from_config(config, mesh, tokenizer.byte_lengths)
        source = open_folder(job["folder"])
        state = steps.init_from_params(read_folder_params(source, steps.abstract_saved["params"]))
        run = jax.jit(steps.engine.value_and_grad(steps.train_schedule))
        found = run(state.params, jax.device_put(batch, steps.batch_sharding), None)
    assert float(found.loss) == pytest.approx(wanted, rel=1e-5)
    gradients = jax.device_get(steps.to_saved(state._replace(params=found.gradients))["params"])
    theirs = open_folder(job["gradients"])
    for name, mine in leaves_by_name(gradients).items():
        close(mine, theirs.read_region(name, np.dtype(np.float32), [slice(None)] * mine.ndim))


def logits(folder: Path, model: str, tokens: np.ndarray) -> np.ndarray:
    return _logits(folder, model, tokens, VOCAB)


def test_import_sft_export_loads_in_transformers(tmp_path: Path) -> None:
    """Fine-tune on two stages with two shards; the export has tokenizer and chat template."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    np.save(tmp_path / "tokens.npy", tokens)
    job = job_of("llama", 0, tmp_path, num_hidden_layers=4, vocab_size=VOCAB)
    use_fixed_frequencies(job["config"])
    run_oracle("make", [{**job, "folder": str(tmp_path / "base")}], tmp_path)
    make_tokenizer(tmp_path / "base", CHATML)
    write_records(tmp_path / "chats.jsonl", [{"messages": each} for each in RECORDS * 6])
    keys = [
        *("train.objective=sft", "train.steps=6", "train.batch_size=8", "train.sequence_length=64"),
        *("data.source=jsonl", "data.path=chats.jsonl", "data.chat=messages"),
        *("data.packing=best_fit", "data.validation_fraction=0.2", "optim.learning_rate=1e-3"),
        *("model.compute_dtype=float32", "mesh.cpu_devices=4", "mesh.ici_stage=2"),
        *("mesh.ici_fsdp=2", "pipeline.microbatches=4", "pipeline.schedule=1f1b"),
        *("eval.sample_every=6", "eval.sample_prompts=[]", "eval.sample_conversations=2"),
        *("run.name=tuned", "runtime.platform=cpu", "eval.batches=2"),
    ]
    commands = (
        ["import", "base", "--out", "runs/base"],
        ["train", "runs/base/config.yml", *keys],
        ["export", "tuned", "out"],
    )
    for command in commands:
        ran = subprocess.run(
            [sys.executable, "-m", "maxpipe", *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | FAST_COMPILE | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    [line] = (tmp_path / "runs/tuned/samples.jsonl").read_text().splitlines()
    for sample in json.loads(line)["samples"]:
        assert sample.keys() == {"prompt", "text", "tokens", "finish_reason", "answer"}
        assert any(sample["answer"] == f"{each[-1]['content']}" for each in RECORDS)
    code = (
        "import numpy, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained('out').eval()\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained('out')\n"
        "said = [{'role': 'user', 'content': 'Hi'}]\n"
        "ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=True)\n"
        "assert tokenizer.decode(ids['input_ids']).endswith('<|im_start|>assistant\\n')\n"
        "tokens = torch.from_numpy(numpy.load('tokens.npy'))\n"
        "numpy.save('loaded.npy', model(tokens).logits.detach().numpy())\n"
    )
    ran = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found, before = (logits(tmp_path, each, tokens) for each in ("runs/tuned", "base"))
    close(np.load(tmp_path / "loaded.npy"), found)
    assert np.abs(found - before).max() > 1e-2 * np.abs(before).max()
