"""Multi-token prediction layers: logits and losses equal those of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.checkpoint.address import parse_address
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.import_ import import_folder
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from maxpipe.restore.initial_weights import map_named_leaves
from tests.huggingface import maker
from tests.huggingface.test_oracle import PYTHON, close, job_of, reason, run_oracle

pytestmark = pytest.mark.oracle


def count(number: int, tied: bool = False) -> dict[str, Any]:
    """Return the number of layers, as DeepSeek-V3 and GLM-4.5 state it."""
    return {"num_nextn_predict_layers": number, "tie_word_embeddings": tied}


# The first case of a class is in float32.
WHOLE = {"num_hidden_layers": 4, "full_attention_interval": 2, "num_experts_per_tok": 2}
JOBS: list[tuple[str, dict[str, Any], int]] = [
    ("deepseek_v3", count(1), 0),
    ("deepseek_v3", count(2), 3),
    ("deepseek_v3", count(2, tied=True), 6),
    ("glm4_moe", count(1) | {"attention_bias": True, "use_qk_norm": True}, 0),
    ("deepseek_v32", count(1), 0),
    ("glm_moe_dsa", count(1), 0),
    ("qwen3_5", WHOLE, 0),
    ("qwen3_5_moe", WHOLE, 0),
]
CASES = range(len(JOBS))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Folders with one or two multi-token prediction layers, tied and untied."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base = tmp_path_factory.mktemp("ahead")
    found = []
    for kind, changes, number in JOBS:
        job = job_of(kind, number, base, **changes)
        found.append(job | {"logits": str(base / f"{kind}-{number}.npz"), "max_shard_size": "1GB"})
    for action in ("make", "add_ahead", "ahead"):
        run_oracle(action, [each | {"logits": each["logits"]} for each in found], base)
    return found


@pytest.mark.parametrize("number", CASES)
def test_mtp_logits_and_losses_equal_transformers(number: int, jobs: list[dict[str, Any]]) -> None:
    job = jobs[number]
    source = open_folder(job["folder"])
    config = dataclasses.replace(source.config, compute_dtype="float32")
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    params = _params(source, decoder)
    ids = jnp.asarray(np.load(job["tokens"]), jnp.int32)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    batch = {
        "tokens": tokens,
        "targets": targets,
        "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        "segment_ids": jnp.ones_like(tokens),
        "loss_mask": jnp.ones(tokens.shape),
        "example_ids": jnp.arange(2),
    }
    saved = np.load(job["logits"])
    with jax.default_matmul_precision("highest"):
        losses = jax.jit(lambda: decoder.run(params, batch).losses)()
        hidden = decoder.norm(params["final_norm"], decoder.hidden(params, batch))
        for head in range(config.mtp_heads):
            mine = jax.tree.map(lambda leaf, at=head: leaf[at], params["ahead"])
            later = decoder.embed(params["embedding"], jnp.roll(tokens, -1 - head, axis=1))
            at = jnp.int32(head)
            hidden, *_ = decoder.mtp_layer(mine, hidden, later, batch, at)
            table = params["embedding"].T if config.tied_embeddings else params["head"]
            # The oracle was given one more token.
            wanted = saved[f"arr_{head}"][:, :-1]
            close(np.asarray(hidden @ table)[:, : -1 - head], wanted)
            wide = wanted.astype(np.float64)
            scores = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
            nats = -np.take_along_axis(scores, np.asarray(targets)[:, 1 + head :, None], -1).sum()
            np.testing.assert_allclose(losses[f"ahead_{head + 1}"], nats, rtol=1e-4)


@pytest.mark.parametrize("number", CASES)
def test_exported_mtp_weights_and_logits_are_unchanged(
    number: int, jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = jobs[number]
    import_folder(job["folder"], str(tmp_path / "checkpoint"), print)
    out = tmp_path / "out"
    export(parse_address(str(tmp_path / "checkpoint")), str(out), None, print)
    maker.same_bits(maker.read(out), maker.read(Path(job["folder"])))
    run_oracle("ahead", [job | {"folder": str(out), "logits": str(tmp_path / "x.npz")}], tmp_path)
    before, after = np.load(job["logits"]), np.load(tmp_path / "x.npz")
    for name in before:
        close(after[name], before[name])


def _params(source: Any, decoder: Decoder) -> Any:
    """Return all parameters of a folder, with layers by type."""
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    kinds = [*shapes["layers"]]
    if len(kinds) == 1:
        shapes["layers"] = shapes["layers"][kinds[0]]

    def read(name: str, leaf: Any) -> Any:
        whole = [slice(None)] * leaf.ndim
        return jnp.asarray(source.read_region(name, np.dtype(np.float32), whole))

    params = map_named_leaves(read, shapes)
    return params if len(kinds) > 1 else params | {"layers": {kinds[0]: params["layers"]}}
