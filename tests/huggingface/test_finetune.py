"""Commands of docs/tutorials/finetune.md and sft.md: import, train with stages and FSDP, export."""

from __future__ import annotations

import json
import re
import subprocess
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
from tests.huggingface.test_oracle import PYTHON, close, reason
from tests.pages import DOCS, run_page
from tests.train.runs import ledger, losses

PAGE = DOCS / "tutorials" / "finetune.md"
VOCAB = 320


def accuracies(output: str) -> list[float]:
    """Return the accuracies that `maxpipe eval --choices` printed."""
    return [float(each) for each in re.findall(r"^accuracy +([\d.]+)", output, re.M)]


def losses_of(output: str) -> list[float]:
    """Return the losses in nats per token that `maxpipe eval` printed."""
    return [float(each) for each in re.findall(r"^loss +([\d.]+) nats per token", output, re.M)]


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
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder in which the commands of the page ran, which is empty at first, and their output."""
    folder = tmp_path_factory.mktemp("finetune")
    return folder, "".join(run_page(PAGE, folder, FAST_COMPILE))


@pytest.mark.long
def test_finetuning_improves_held_out_loss_and_accuracy(finished: tuple[Path, str]) -> None:
    folder, output = finished
    train = losses(folder / "runs" / "base-tuned")
    assert train[120] < train[10] - 0.2
    before, after = losses_of(output)
    assert after < 0.7 * before
    before, after = accuracies(output)
    assert before < 0.7 and after > 0.85
    assert "stage 2 x fsdp 2" in output


@pytest.mark.long
def test_exported_folder_has_the_trained_weights_and_the_files_of_base(
    finished: tuple[Path, str],
) -> None:
    folder, _ = finished
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    found = logits(folder, "tuned", tokens)
    assert (found == logits(folder, "runs/base-tuned@best", tokens)).all()
    assert np.abs(found - logits(folder, "base", tokens)).max() > 0.1
    config = json.loads((folder / "tuned" / "config.json").read_text())
    kept = json.loads((folder / "base" / "config.json").read_text())
    assert config["max_position_embeddings"] == kept["max_position_embeddings"]
    before, after = (folder / each / "tokenizer.json" for each in ("base", "tuned"))
    assert before.read_bytes() == after.read_bytes()


@pytest.mark.long
def test_sft_example_learns_and_stops_early(tmp_path: Path) -> None:
    """A pretrained model learns to answer; the run stops early, and its curves are drawn."""
    outputs = run_page(DOCS / "tutorials" / "sft.md", tmp_path)
    chat = tmp_path / "runs" / "chat"
    accuracy = losses(chat, "eval/sums/accuracy")
    best = max(accuracy.values())
    assert accuracy[20] < 0.8 and best > 0.9
    assert [*losses(chat, "eval/loss").values()][-1] < 0.2
    [stop] = ledger(chat, "early_stop")
    assert accuracy[stop["best_step"]] == best and stop["evaluations"] == 3
    [evaluated] = accuracies(outputs[-1])
    assert evaluated == pytest.approx(best, abs=1e-3)
    sampled = [json.loads(line) for line in (chat / "samples.jsonl").read_text().splitlines()]
    assert all(each["text"] and each["answer"] for each in sampled[-1]["samples"])
    drawn = (tmp_path / "sft.svg").read_text()
    assert drawn.startswith("<svg") and "eval/sums/accuracy" in drawn
    exported = tmp_path / "chat-model"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (tmp_path / "small-tokenizer" / name).read_bytes()


@pytest.mark.oracle
def test_transformers_loads_the_exported_folder(finished: tuple[Path, str]) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    folder, _ = finished
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    np.save(folder / "tokens.npy", tokens)
    (code,) = re.findall(
        r"<!-- transformers -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    code += "import numpy, torch\n"
    code += "tokens = torch.from_numpy(numpy.load('tokens.npy'))\n"
    code += "numpy.save('loaded.npy', model.eval()(tokens).logits.detach().numpy())\n"
    run = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )
    assert run.returncode == 0, run.stderr
    close(np.load(folder / "loaded.npy"), logits(folder, "runs/base-tuned@best", tokens))
