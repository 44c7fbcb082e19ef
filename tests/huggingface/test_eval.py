"""`maxpipe eval` of models without a run, compared with an unpipelined loop over documents."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizer import open_tokenizer
from maxpipe.distributed import runtime
from maxpipe.huggingface.folder import open_folder
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.restore.open_model import open_address_or_folder
from maxpipe.step.build import steps_from_config
from tests.errors import without_codes
from tests.huggingface import maker
from tests.times import shared
from tests.train.runs import SAME, is_explained

TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizers" / "folder"
VOCAB = 437  # three more than the tokenizer has
TEXTS = ["The cat sat on the mat.", "naïve 語 😀", "", "One two three,\nfour."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama with a tokenizer, its import, and text in `texts` and `lines.jsonl`."""
    base = tmp_path_factory.mktemp("eval")
    config, tensors = maker.llama("F32", VOCAB, tie_word_embeddings=True)
    tensors = {name: each * np.float32(0.5) for name, each in tensors.items()}
    maker.write(base / "hf", config, tensors)
    shutil.copytree(TOKENIZER, base / "hf", dirs_exist_ok=True)
    (base / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (base / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (base / "lines.jsonl").write_text(lines)
    assert main(["import", str(base / "hf"), "--out", str(base / "imported")]) == 0
    return base


@shared
def by_text(folder: Path) -> list[tuple[float, int]]:
    """Return the loss in nats and the number of targets of each document."""
    tokenizer = open_tokenizer(TokenizerConfig(kind="auto", path=str(folder)))
    rules = AxisRules.from_config(MeshConfig())
    chosen = open_address_or_folder(folder, [], lambda config: dict(config))
    steps = steps_from_config(
        chosen.loaded.config, build_mesh(MeshConfig(), jax.devices()[:1]), np.zeros(1)
    )
    params = steps.param_layout.split_layer_types(chosen.params(steps))
    decoder = Decoder(chosen.loaded.config.model, rules)
    apply, room, found = jax.jit(decoder.apply), 40, []
    for text in TEXTS:
        ids = [tokenizer.begin_id, *tokenizer.encode(text).tolist(), tokenizer.end_id]
        count = len(ids) - 1
        row = jnp.asarray([ids[:-1] + [0] * (room - count)])
        inputs = {"tokens": row, "segment_ids": (jnp.arange(room) < count)[None].astype(int)}
        inputs |= {"positions": jnp.arange(room)[None]}
        scores = jax.nn.log_softmax(apply(params, inputs)[0])
        found.append((-float(scores[jnp.arange(count), jnp.asarray(ids[1:])].sum()), count))
    return found


def expected(folder: Path, *, has_empty: bool) -> tuple[float, int]:
    """Return the total loss in nats and the total number of targets."""
    found = zip(TEXTS, by_text(folder), strict=True)
    nats, targets = zip(*(each for text, each in found if text or has_empty), strict=True)
    return sum(nats), sum(targets)


def test_eval_loss_equals_unpipelined_loop(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate a folder on text files, and the same weights imported on JSON Lines."""
    monkeypatch.setattr(
        runtime, "start", lambda *_, **__: None
    )  # use the devices of the test process
    monkeypatch.chdir(folder)
    assert open_folder("hf").dtype == "F32"
    size = len("".join(TEXTS).encode())
    for model, data in (("hf", "texts"), ("imported", "lines.jsonl")):
        options = ["train.sequence_length=91", "model.compute_dtype=float32", "--json"]
        assert main(["eval", model, "--data", data, *options]) == 0
        found = json.loads(capsys.readouterr().out)
        # An empty file is not a document; a line with an empty string is one.
        nats, targets = expected(folder / "hf", has_empty=data != "texts")
        assert (found["tokens"], found["bytes"]) == (targets, size)
        assert found["nats_per_token"] == pytest.approx(nats / targets, rel=SAME)
        assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=SAME)
        assert found["perplexity"] == pytest.approx(math.exp(nats / targets), rel=10 * SAME)
        assert (found["sequence_length"], found["split"]) == (91, "all")
        assert (found["mesh"], found["source"]) == ("data 8", {"texts": "text"}.get(data, "jsonl"))


def test_folder_opens_with_layers_that_are_not_quantized(folder: Path) -> None:
    found = []
    for given in ([], ["model.matmul=int8", "model.matmul_unquantized_layers=1"]):
        opened = open_address_or_folder(folder / "hf", given, dict)
        mesh = build_mesh(MeshConfig(), jax.devices()[:1])
        steps = steps_from_config(opened.loaded.config, mesh, np.zeros(1))
        found.append(jax.device_get(opened.params(steps)))
    plain, split = found
    assert [*split["layers"]] == ["layer", "layer_unquantized"]
    layers = jax.tree.map(lambda *stacks: np.concatenate(stacks), *split["layers"].values())
    jax.tree.map(np.testing.assert_array_equal, split | {"layers": layers}, plain)


MISTAKES = {
    "hf": "must be given: hf contains only weights",
    "imported": "must be given: ",
    "hf data.path=texts": "is ignored with data.source=corpus",
    "hf --data nowhere": "command line: --data = nowhere\n  must be a file, a folder or a glob",
    "hf --data .": "must contain files of one format",
    "hf --data texts data.path=other": "conflicts with data.path=other: both select documents",
    "hf --data texts model.num_layers=2": "the value in the checkpoint",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_eval_rejects_invalid_arguments(
    arguments: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["eval", *arguments.split()]) == 2
    output = capsys.readouterr().err
    is_explained(output)
    assert MISTAKES[arguments] in without_codes(output)
