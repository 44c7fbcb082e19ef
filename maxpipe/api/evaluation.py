"""Evaluate the state of a custom loop, or a checkpoint or Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from maxpipe.api.arguments import check_path, check_unused, locate_errors
from maxpipe.api.checkpoint import Checkpoint
from maxpipe.api.config import ConfigSource, config_inputs
from maxpipe.api.trainer import Batch, Trainer
from maxpipe.config.sections.source import COLUMNS
from maxpipe.data.sources import infer_source
from maxpipe.errors import Code, ConfigError
from maxpipe.evals.evaluate import EvalReport, evaluate_model
from maxpipe.huggingface.folder import resolve_model
from maxpipe.step.state import TrainState

SavedModel = str | os.PathLike[str] | Checkpoint
"""A saved model: RUN, RUN@STEP, RUN@best, a checkpoint, or the path of a Hugging Face folder."""


@overload
def evaluate(
    model: Trainer, state: TrainState, *, batches: Iterable[Batch] | None = None
) -> dict[str, float]: ...


@overload
def evaluate(
    model: SavedModel,
    *,
    overrides: Sequence[ConfigSource] = (),
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    average: bool = False,
    on_status: Callable[[str], None] | None = None,
) -> EvalReport | None: ...


@locate_errors
def evaluate(
    model: Trainer | SavedModel,
    state: TrainState | None = None,
    *,
    batches: Iterable[Batch] | None = None,
    overrides: Sequence[ConfigSource] = (),
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    average: bool = False,
    on_status: Callable[[str], None] | None = None,
) -> dict[str, float] | EvalReport | None:
    """Compute the loss of a model on held-out documents.

    With a trainer, the state is evaluated on its devices. The result contains the metrics of
    `maxpipe train`, such as `eval/loss` in nats per target token, `eval/nats_per_byte` and the
    accuracy of `eval.tasks`. With a saved model, the result is the report of `maxpipe eval`, such
    as `nats_per_token` and `perplexity`; no file is written, and the run may still be training.

    Args:
        model: trainer, address RUN@STEP, checkpoint, or Hugging Face folder.
        state: train state to evaluate, only with a trainer.
        batches: batches to evaluate in place of the config's validation data, as in `train_step`;
            only with a trainer. The losses are weighted by `loss_mask`.
        overrides: configs and overrides that change the config of a saved model, such as
            `eval.batches=0` for all batches.
        data: file, folder or glob pattern to evaluate a saved model on, in place of the validation
            data.
        split: split of a saved model's data: `validation`, `train`, `all`, or the name of a set in
            `data.validation`.
        average: whether to evaluate the EMA parameters of a saved model.
        on_status: function that receives progress messages about a saved model.

    Returns:
        Metrics keyed by tag, or a report. In runs of several processes, only process 0 receives the
        report of a saved model; the result in the other processes is None.

    Raises:
        ConfigError: the model does not exist, or does not match the data or the devices, or an
            argument has no effect.
        StorageError: the checkpoint is damaged.
        DivergenceError: the loss of a saved model is not finite.
    """
    if isinstance(model, Trainer):
        unused = {"overrides": bool(overrides), "data": data is not None}
        unused |= {"split": split is not None, "average": average}
        check_unused("evaluate", "a trainer", **unused)
        if state is None:
            rule = "is required with a trainer, which holds no state."
            action = "Pass the state: maxpipe.evaluate(trainer, state)."
            raise ConfigError.one(Code.API_STATE, "evaluate: state", None, rule, action)
        model.check_state(state)
        return model.evaluate(state, batches)
    unused = {"state": state is not None, "batches": batches is not None}
    check_unused("evaluate", "a saved model", **unused)
    inputs = config_inputs(overrides)
    if data is not None:
        check_path("evaluate: data", data, "the documents", "Pass the path of a file or folder.")
        inputs += select_documents(os.fspath(data), inputs, "evaluate: data")
    named = resolve_model(model_address(model), average=average)
    return evaluate_model(named, inputs, split, on_status or _ignore)


def model_address(model: SavedModel) -> str:
    """Return the address of a saved model, as commands accept it."""
    if isinstance(model, Checkpoint):
        return model.address
    check_path("model", model, "a saved model", "Pass RUN@STEP, a folder, or a trainer.")
    return os.fspath(model)


def select_documents(path: str, inputs: Sequence[object], where: str) -> list[str]:
    """Return the overrides that select files as the only documents.

    `where` names the argument with the path in error messages.

    Raises:
        ConfigError: `inputs` also select documents, or the format of the files is unknown.
    """
    for each in inputs:
        if isinstance(each, str) and each.startswith(("data.source=", "data.path=")):
            rule = f"conflicts with {each}: both select documents."
            raise ConfigError.one(
                Code.CLI_CONFLICT, where, path, rule, "Leave out one of the two arguments."
            )
    source = infer_source(path, where)
    found = [f"data.source={source}", f"data.path={path}", "data.paths=[]"]
    found += ["data.mixture={}", "data.mixture_stages=[]", "data.mixture_temperature=1"]
    without = ["data.template=", "data.chat=off", "data.chat_template="]
    without.append("train.objective=pretrain")
    return found if source in COLUMNS else [*found, *without]


def _ignore(text: str) -> None:
    """Ignore a progress message."""
