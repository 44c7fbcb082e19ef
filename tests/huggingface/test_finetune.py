"""Commands of docs/tutorials/finetune.md and sft.md: import, train with stages and FSDP, export."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.huggingface.folder import resolve_model
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.restore.open_model import open_address_or_folder
from maxpipe.step.build import steps_from_config
from tests.conftest import FAST_COMPILE
from tests.huggingface import maker
from tests.huggingface.test_oracle import PYTHON, close, reason, run_oracle
from tests.pages import DOCS, run_page
from tests.train.runs import ledger, losses

PAGE = DOCS / "tutorials" / "finetune.md"
TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizers" / "folder"
VOCAB = 437
WORDS = ("the", "sea", "was", "cold", "and", "grey", "when", "we", "sailed", "out")


@dataclass(frozen=True)
class Loop:
    """The folder in which the page's commands ran, and the output of each block."""

    folder: Path
    outputs: list[str]


def loop(folder: Path) -> Loop:
    """Run the page's commands in a folder that contains `base`."""
    shutil.copytree(TOKENIZER, folder / "base", dirs_exist_ok=True)
    draw = random.Random(0)
    (folder / "book").mkdir()
    for number in range(12):
        (folder / "book" / f"{number}.txt").write_text(" ".join(draw.choices(WORDS, k=160)))
    return Loop(folder, run_page(PAGE, folder, FAST_COMPILE))


def assert_losses_decrease(done: Loop) -> None:
    """Assert that the losses of training and evaluation decrease."""
    train = losses(done.folder / "runs" / "base-tuned")
    assert train[40] < train[10] - 0.5
    nats = [
        float(found[1])
        for output in done.outputs
        if (found := re.search(r"^loss +([\d.]+) nats per token", output, re.M))
    ]
    before, after = nats
    assert after < before - 0.5
    assert "stage 2 x fsdp 2" in "".join(done.outputs)


def logits(folder: Path, model: str, tokens: np.ndarray, vocab: int = VOCAB) -> np.ndarray:
    """Return the logits of a checkpoint or folder, from an unpipelined loop in float32."""
    chosen = open_address_or_folder(
        resolve_model(str(folder / model)), ["model.compute_dtype=float32"], one_device
    )
    config = chosen.loaded.config
    steps = steps_from_config(config, build_mesh(MeshConfig(), jax.devices()[:1]), np.zeros(vocab))
    params = steps.param_layout.split_layer_types(chosen.params(steps))
    decoder = Decoder(config.model, AxisRules.from_config(MeshConfig()))
    rows = jnp.asarray(tokens, jnp.int32)
    batch = {"tokens": rows, "segment_ids": jnp.ones_like(rows)}
    batch["positions"] = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(decoder.apply)(params, batch))


def one_device(config: Any) -> dict[str, Any]:
    return {name: config[name] for name in ("model", "tokenizer")} | {"train": {"steps": 1}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """Results of the page's commands for a folder made without transformers."""
    folder = tmp_path_factory.mktemp("finetune")
    config, tensors = maker.llama("BF16", VOCAB, tie_word_embeddings=True)
    small = {name: (0.3 * each).astype(each.dtype) for name, each in tensors.items()}
    maker.write(folder / "base", config, small, files=2)
    return loop(folder)


@pytest.mark.long
def test_finetune_page_commands(written: Loop) -> None:
    assert_losses_decrease(written)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    found = logits(written.folder, "tuned", tokens)
    assert (found == logits(written.folder, "runs/base-tuned@best", tokens)).all()
    assert np.abs(found - logits(written.folder, "base", tokens)).max() > 0.1
    config = json.loads((written.folder / "tuned" / "config.json").read_text())
    kept = json.loads((written.folder / "base" / "config.json").read_text())
    assert config["max_position_embeddings"] == kept["max_position_embeddings"]
    for name in ("tokenizer.json", "generation_config.json"):
        before, after = (written.folder / each / name for each in ("base", "tuned"))
        assert before.read_bytes() == after.read_bytes()


@pytest.mark.long
def test_sft_example_learns_and_stops_early(tmp_path: Path) -> None:
    """A pretrained model learns to answer; the run stops early, and its curves are drawn."""
    outputs = run_page(DOCS / "tutorials" / "sft.md", tmp_path)
    chat = tmp_path / "runs" / "chat"
    accuracy = losses(chat, "eval/sums/accuracy")
    assert accuracy[20] < 0.8 and max(accuracy.values()) == 1
    assert [*losses(chat, "eval/loss").values()][-1] < 0.1
    [stop] = ledger(chat, "early_stop")
    assert accuracy[stop["best_step"]] == 1 and stop["evaluations"] == 3
    said = outputs[-1]
    assert re.search(r"^accuracy +1\.0000", said, re.M)
    assert "3 plus 4 is 7." in said and "9 plus 8 is 17." in said
    sampled = [json.loads(line) for line in (chat / "samples.jsonl").read_text().splitlines()]
    assert all(each["text"] == each["answer"] for each in sampled[-1]["samples"])
    drawn = (tmp_path / "sft.svg").read_text()
    assert drawn.startswith("<svg") and "eval/sums/accuracy" in drawn
    exported = tmp_path / "chat-model"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (tmp_path / "small-tokenizer" / name).read_bytes()


@pytest.mark.oracle
def test_finetune_page_from_and_to_transformers(tmp_path: Path) -> None:
    """Transformers makes the base model, and loads the export as on the page."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    np.save(tmp_path / "tokens.npy", tokens)
    sizes = {"vocab_size": VOCAB, "hidden_size": 20, "intermediate_size": 38}
    sizes |= {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    job = {
        "folder": str(tmp_path / "base"),
        "config_class": "LlamaConfig",
        "architecture": "LlamaForCausalLM",
        "config": sizes | {"head_dim": 6, "tie_word_embeddings": True},
        "seed": 3,
        "dtype": "bfloat16",
        "max_shard_size": "20KB",
        "tokens": str(tmp_path / "tokens.npy"),
        "logits": str(tmp_path / "logits.npy"),
    }
    run_oracle("make", [job], tmp_path)
    close(logits(tmp_path, "base", tokens), np.load(job["logits"]))
    done = loop(tmp_path)
    assert_losses_decrease(done)
    (code,) = re.findall(
        r"<!-- transformers -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    code += "import numpy, torch\n"
    code += "tokens = torch.from_numpy(numpy.load('tokens.npy'))\n"
    code += "numpy.save('loaded.npy', model.eval()(tokens).logits.detach().numpy())\n"
    run = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    close(np.load(tmp_path / "loaded.npy"), logits(tmp_path, "runs/base-tuned@best", tokens))
