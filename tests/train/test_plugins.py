"""The example plug-in: equality with a plain loop over layers, and real runs of its config."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.config import plugins
from maxpipe.config.load import load
from maxpipe.parallel.mesh import build_mesh
from maxpipe.step.build import steps_from_config
from tests.cases import TOLERANCE
from tests.errors import assert_error
from tests.pipeline.test_objective import plain
from tests.train.runs import Run, Start, ledger, saved, start_pair, wait_for_outputs

ROOT = Path(__file__).parents[2]
EXAMPLE, CONFIG = ROOT / "examples" / "plugin.py", ROOT / "examples" / "plugin.yml"
ALLOW = "plugins.allow_code=true"
SMALL = (
    *("train.steps=4", "train.sequence_length=16", "checkpoint.every=2", "eval.every=2"),
    *("eval.batches=1", "log.every=1", "runtime.compilation_cache=", "runtime.platform=cpu"),
)


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in the root of the repository, and unload all plug-ins afterwards."""
    monkeypatch.chdir(ROOT)
    yield
    plugins.unload_plugins()


def example() -> Any:
    """Return the module of the example; other tests may have loaded other plug-ins."""
    loaded = [each for name, each in sys.modules.items() if name.startswith("maxpipe_plugin_")]
    return next(each for each in loaded if each.__file__ == str(EXAMPLE))


# Equality.


@pytest.mark.usefixtures("in_root")
@pytest.mark.parametrize("remat", ["full", "none", "names"])
def test_values_and_gradients_match_plain_loop(remat: str) -> None:
    overrides = [
        "train.sequence_length=8",
        "model.d_model=16",
        "model.d_mlp=24",
        "model.head_dim=4",
    ]
    config = load([str(CONFIG), ALLOW, *SMALL, *overrides, f"pipeline.remat={remat}"]).config
    steps = steps_from_config(
        config, build_mesh(config.mesh, jax.devices()[:2]), np.ones(259, np.int32)
    )
    assert steps.train_schedule.name == "thrifty" and steps.train_schedule.ring.num_stages == 2
    random, rows = np.random.default_rng(0), config.train.batch_size
    ids = random.integers(0, 259, (rows, 9), np.int32)
    place = np.arange(8, dtype=np.int32)
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": np.ones((rows, 8), np.int32),
        "positions": np.broadcast_to(place, (rows, 8)),
        "loss_mask": random.integers(0, 2, (rows, 8)).astype(np.float32),
        "example_ids": np.arange(rows, dtype=np.int32),
    }
    objective, parts = steps.objective, steps.param_layout
    params, means, wanted = plain(steps, objective, batch)
    run = steps.engine.value_and_grad(steps.train_schedule)

    def piped(params: Any, batch: Any) -> Any:
        result = run(parts.stack(params), batch, None)
        reports = [result.reports[name] for name in objective.report_names]
        return [result.loss, *reports], parts.unstack(result.gradients)

    with jax.set_mesh(parts.mesh):
        values, gradients = jax.jit(piped)(params, jax.device_put(batch, steps.batch_sharding))
    np.testing.assert_allclose(values, means, rtol=TOLERANCE)
    for expected, found in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        limit = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@pytest.mark.usefixtures("in_root")
def test_layer_and_loss_match_numpy() -> None:
    load([str(CONFIG), ALLOW])
    random = np.random.default_rng(0)
    part = example().SquaredReluMLP(6, 10, 1.0)
    module = example().SquaredRelu(part, None)
    up, down = random.normal(size=(6, 10)), random.normal(size=(10, 6))
    module.up[...], module.down[...] = up, down
    x = random.normal(size=(2, 3, 6)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example(), "constrain", lambda array, axes, rules: array)
        output = module(x, None).x
    np.testing.assert_allclose(output, np.maximum(x @ up, 0) ** 2 @ down, rtol=1e-4, atol=1e-4)
    scores = np.log(random.uniform(0.1, 0.9, (2, 5))).astype(np.float32)
    loss, (entropy,) = example().Focal(gamma=3.0)((scores,), {})
    np.testing.assert_allclose(loss, -((1 - np.exp(scores)) ** 3) * scores, rtol=1e-5)
    np.testing.assert_allclose(entropy, -scores)


# Runs.


@pytest.fixture(scope="module")
def plugin_run(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The folder of a completed run, the copy of the plug-in that it used, and its output.
    Read-only for tests."""
    folder = tmp_path_factory.mktemp("plugin")
    copy = folder / "plugin.py"
    copy.write_bytes(EXAMPLE.read_bytes())
    output = run("train", *arguments(folder, copy), ALLOW)
    return folder / "plugin", copy, output


def arguments(folder: Path, plugin: Path) -> list[str]:
    text = ROOT / "docs" / "*" / "*.md"
    return [str(CONFIG), f"model.module={plugin}", f"data.path={text}", f"run.dir={folder}", *SMALL]


def test_run_records_digest_but_no_permission(plugin_run: tuple[Path, Path, str]) -> None:
    folder, copy, output = plugin_run
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    assert f"plug-in {copy} (sha256 {digest[:12]})" in output
    metadata = saved(folder).metadata
    assert metadata.data["plugins"] == {"plugin.py": digest}
    assert metadata.config["plugins"] == {
        **{"modules": [str(copy)], "allow_code": False, "allow_change": False}
    }
    assert "allow_code: true" not in (folder / "config.yml").read_text()
    assert ledger(folder, "begin")[0]["plugins"] == {"plugin.py": digest}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < each["train/loss"] < each["train/cross_entropy"] for each in metrics)


def test_commands_need_permission_for_checkpoint(
    plugin_run: tuple[Path, Path, str], run: Run, tmp_path: Path
) -> None:
    folder, copy, _ = plugin_run
    for command in (
        ["generate", str(folder), "--prompt", "a", "--max-tokens", "2"],
        ["eval", str(folder)],
        ["export", str(folder), str(tmp_path / "out")],
    ):
        output = run(*command, code=2)
        assert_error(output, "plugins.modules", f"[{copy}]", suggests=ALLOW)
    run("checkpoints", "list", folder)
    run("checkpoints", "verify", folder)


def test_commands_use_checkpoint_with_permission(
    plugin_run: tuple[Path, Path, str], run: Run, tmp_path: Path
) -> None:
    folder, _, output = plugin_run
    run("generate", folder, "--prompt", "a", "--max-tokens", "2", ALLOW)
    measured = run("eval", folder, ALLOW)
    (before,) = re.findall(r"validation after step 4: (\S+) nats", output)
    (after,) = re.findall(r"(\S+) nats per token", measured)
    assert float(after) == pytest.approx(float(before), abs=1e-4)
    failed = run("export", folder, tmp_path / "out", ALLOW, code=2)
    assert_error(failed, "model.family", "primer")
    failed = run("export", folder, tmp_path / "out", "train.steps=5", code=2)
    assert_error(failed, "command line", "train.steps=5")


def test_planner_counts_parameters_of_plugin_family(run: Run, tmp_path: Path) -> None:
    output = run("plan", *arguments(tmp_path, EXAMPLE), ALLOW, "--json")
    report = json.loads(output[output.index("{") :])
    attention, mlp, norms = 2 * 64 * 64 + 2 * 64 * 32, 2 * 64 * 256, 2 * 64
    assert report["parameters"] == 2 * 259 * 64 + 4 * (attention + mlp + norms) + 64
    assert report["layout"]["pipeline.schedule"] == "thrifty"


@pytest.mark.parametrize("change", ["comment", "loss"])
def test_changed_plugin_needs_permission_to_resume(
    change: str, plugin_run: tuple[Path, Path, str], run: Run, tmp_path: Path
) -> None:
    folder, copy, _ = plugin_run
    shutil.copytree(folder, tmp_path / "plugin")
    code, changed = copy.read_text(), tmp_path / "plugin.py"
    other = code.replace("self.gamma) *", "self.gamma) * 2 *")
    assert other != code
    changed.write_text(f"{code}# comment\n" if change == "comment" else other)
    resumed = [*arguments(tmp_path, changed), ALLOW, "train.steps=6"]
    failed = run("train", *resumed, code=2)
    assert_error(failed, "plugins.modules", "plugin.py", suggests="plugins.allow_change=true")
    output = run("train", *resumed, "plugins.allow_change=true")
    assert "plug-in plugin.py has changed since step 4" in output and "done: 6 steps" in output


@pytest.mark.parametrize("same", [True, False])
def test_all_processes_need_same_code(same: bool, start: Start, tmp_path: Path) -> None:
    others = tmp_path / "other"
    others.mkdir()
    for folder, text in ((tmp_path, ""), (others, "" if same else "# changed\n")):
        (folder / "plugin.py").write_text(EXAMPLE.read_text() + text)
    shared = [*arguments(tmp_path, tmp_path / "plugin.py"), ALLOW, "mesh.cpu_devices=1"]
    second = [f"model.module={others / 'plugin.py'}"]
    with start_pair(start, *shared, second=second) as processes:
        outputs = wait_for_outputs(processes)
    codes = [process.returncode for process in processes]
    if same:
        assert codes == [0, 0] and "done: 4 steps" in outputs[0]
    else:
        assert codes == [2, 2] and any("plug-in plugin.py" in output for output in outputs)
