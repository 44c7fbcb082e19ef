"""Multiple-choice tasks during training: results equal `maxpipe eval` under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError
from maxpipe.evals.language_model import dropless_decoder
from maxpipe.evals.multiple_choice import Question, Task, open_tasks
from maxpipe.parallel.mesh import build_mesh
from maxpipe.step.build import steps_from_config
from tests.cases import TOLERANCE, keeping
from tests.train.runs import Run, records

QUESTIONS = [
    {"context": "the sea", "choices": ["is wet", "dry"], "answer": 0},
    {"context": "2 + 2 =", "choices": ["4", "five", "x"], "answer": "4"},
    {"context": "", "choices": ["Yes", " no"], "answer": 1},
    {"context": "a ", "choices": ["b", "c", "d", "e", "f", "g", "h"], "answer": 3},
]
MODEL = {
    **{"num_layers": 4, "d_model": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
    **{"d_mlp": 24, "vocab_size": 259, "compute_dtype": "float32"},
}
MOE = {
    **MODEL,
    "family": "moe",
    "moe": {"num_experts": 4, "top_k": 2, "d_expert": 12, "capacity_factor": 0.5},
}
LAYOUTS = {
    "stage 4": ["mesh.ici_stage=4", "pipeline.microbatches=4", "pipeline.schedule=1f1b"],
    "stage 2 x fsdp 2 x tensor 2": [
        *("mesh.ici_stage=2", "mesh.ici_fsdp=2", "mesh.ici_tensor=2", "pipeline.repeats=2"),
        "pipeline.microbatches=2",
    ],
    "context 2 x data 2": ["mesh.ici_context=2", "mesh.ici_data=2"],
}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return path


def build_task(path: Path, model: dict[str, Any], keys: list[str]) -> tuple[Task, Any, Any]:
    """Return a task, its decoder with parameters in layer order, and the training parameters."""
    known = {
        "model": model,
        "train": {"steps": 1, "batch_size": 8, "sequence_length": 64},
        "eval": {"tasks": {"q": {"path": str(path)}}},
    }
    config = load(keys, known, "test").config
    count = int(np.prod([getattr(config.mesh, f"ici_{a}") for a in ("stage", "fsdp", "tensor")]))
    count *= config.mesh.ici_context * config.mesh.ici_data
    mesh, tokenizer = build_mesh(config.mesh, jax.devices()[:count]), ByteTokenizer()
    steps = steps_from_config(config, mesh, tokenizer.byte_lengths)
    [task] = open_tasks(config, tokenizer)
    task.compile(steps)
    state = steps.init()
    plain = jax.device_get(steps.param_layout.unstack(state.params))
    return task, (steps.param_layout.decoder, plain), state.params


def logprob(decoder: Any, params: Any, context: str, choice: str) -> float:
    """Return the log-probability of a choice, computed by the unpipelined loop."""
    ids = [256, *context.encode(), *choice.encode()]
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids)] = ids
    batch = {"tokens": row, "positions": np.arange(64)[None], "segment_ids": np.ones_like(row)}
    batch["segment_ids"][0, len(ids) - 1 :] = 0
    logits = jax.jit(dropless_decoder(decoder).apply)(params, batch)
    scores = np.asarray(jax.nn.log_softmax(logits[0]))
    first = len(ids) - len(choice.encode())
    return float(sum(scores[place - 1, ids[place]] for place in range(first, len(ids))))


@pytest.mark.parametrize(
    ("layout", "model"),
    keeping([*((name, MODEL) for name in LAYOUTS), ("context 2 x data 2", MOE)], 1),
    ids=[*LAYOUTS, "experts"],
)
def test_choice_loglikelihoods_equal_unpipelined_loop(
    layout: str, model: dict[str, Any], questions: Path
) -> None:
    task, (decoder, plain), params = build_task(questions, model, LAYOUTS[layout])
    assert task._scoring_steps.shape == (8, 16)  # no longer than the questions need
    pairs = [("the sea", " is wet"), ("2 + 2 =", " five"), ("", "Yes"), *[("a ", "h")] * 9]
    task._params = params
    found = [score.logprob for score in task.loglikelihood(pairs)]
    wanted = [logprob(decoder, plain, context, choice) for context, choice in pairs]
    assert found == pytest.approx(wanted, rel=TOLERANCE)
    moved: list[int] = []
    answered = task.evaluate(params, lambda: False, lambda: moved.append(1))
    assert answered is not None and answered["questions"] == 4 and moved
    assert task.evaluate(params, lambda: True, lambda: None) is None
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    answered = task.evaluate(broken, lambda: False, lambda: None)
    assert answered is not None and np.isnan(answered["accuracy"])


def test_missing_or_invalid_task_file_is_reported(tmp_path: Path, questions: Path) -> None:
    for content, words in (
        (None, "eval.tasks.q.path"),
        ('{"context": 1}\n', "questions.jsonl:1"),
        (json.dumps(QUESTIONS[0]).replace("the sea", "long" * 20), "has 87 tokens"),
    ):
        questions.unlink() if content is None else questions.write_text(content)
        with pytest.raises(ConfigError, match=words):
            build_task(questions, MODEL, [])


def test_chat_task_requires_chat_template(questions: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.tasks.q.chat .*\n  requires a chat template"):
        build_task(questions, MODEL, ["eval.tasks.q.chat=true"])


def test_chat_template_formats_contexts(questions: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}A: {% endfor %}")
    chats = ["data.source=jsonl", "data.path=x", "data.chat=messages"]
    keys = [*chats, f"data.chat_template={template}", "eval.tasks.q.chat=true"]
    task, *_ = build_task(questions, MODEL, keys)
    [first, *_] = task._multiple_choice.questions
    assert first == Question(1, "the sea<end>A: ", ("is wet", "dry"), 0)
    row = task._texts.sequence(*task._multiple_choice.continuations(first)[0])
    assert row.context == [*b"the sea", 257, *b"A: "] and row.target == [*b"is wet"]


@pytest.mark.long
def test_accuracy_equals_eval_command_and_selects_best_checkpoint(
    questions: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    """The run has four stages; the question file is deleted before it resumes."""
    keys = [f"eval.tasks.q.path={questions}", "eval.every=8", "checkpoint.every=8"]
    keys += ["checkpoint.best_metric=eval/q/accuracy", "checkpoint.best_mode=max"]
    output = run("train", tiny, f"run.dir={tmp_path}", *keys, "train.steps=16")
    folder = tmp_path / "run"
    metrics = {step: each for step, each in records(folder).items() if "eval/loss" in each}
    assert [*metrics] == [8, 16] and "task q after step 16: accuracy" in output
    for step, found in metrics.items():
        asked = run("eval", f"{folder}@{step}", "--choices", questions, "--json")
        result = json.loads(asked[asked.index("{") :])
        for name in ("accuracy", "accuracy_by_bytes"):
            assert found[f"eval/q/{name}"] == result[name]
    best = max(metrics, key=lambda step: (metrics[step]["eval/q/accuracy"], step))
    value = metrics[best]["eval/q/accuracy"]
    best_line = run("checkpoints", "best", folder).splitlines()[-1]
    assert best_line == f"{folder}@{best}  eval/q/accuracy {value:.6g}"
    questions.unlink()
    # Evaluating documents does not read the question file named by the config.
    assert "restoring" in run("eval", f"{folder}@best", "mesh.cpu_devices=1")
    resumed = run("train", tiny, f"run.dir={tmp_path}", *keys, "train.steps=24", code=2)
    assert "eval.tasks.q.path" in resumed and "Traceback" not in resumed
