"""lm-evaluation-harness evaluates a model; skipped if the harness is not installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.distributed import runtime
from maxpipe.errors import ConfigError
from maxpipe.evals.language_model import LanguageModel, ScoringTokenizer
from maxpipe.evals.multiple_choice import MultipleChoice, read_questions, summarize_results
from maxpipe.generation.load_model import open_model
from maxpipe.huggingface.folder import resolve_model
from tests.huggingface import maker
from tests.train.runs import SAME

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("needs lm-evaluation-harness", allow_module_level=True)

TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizers" / "folder"
QUESTIONS = [
    {"context": "Two and two are", "choices": ["four", "a very large number"], "answer": 0},
    {"context": "The sea is", "choices": ["dry", "wet and cold"], "answer": 1},
    {"context": "One, two,", "choices": ["three", "a"], "answer": 0},
]
MESH = {"mesh.ici_data": 8, "model.compute_dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer."""
    base = tmp_path_factory.mktemp("harness")
    maker.write(base / "hf", *maker.llama("F32", vocab=437))
    shutil.copytree(TOKENIZER, base / "hf", dirs_exist_ok=True)
    return base


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from maxpipe.evals.harness import HarnessModel

    monkeypatch.setattr(
        runtime, "start", lambda *_, **__: None
    )  # use the devices of the test process
    config = {"batch_size": 5, "max_batch_size": None, "device": None}
    return HarnessModel.create_from_arg_obj({"pretrained": str(folder / "hf"), **MESH}, config)


@pytest.mark.filterwarnings("ignore")  # warnings of the harness's own packages
def test_harness_accuracy_equals_own_accuracy(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    evaluated = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    opened = open_model(
        resolve_model(str(folder / "hf")), [f"{key}={value}" for key, value in MESH.items()]
    )
    language_model = LanguageModel(
        opened.load(print), ScoringTokenizer(opened.tokenizer, opened.max_length)
    )
    results = list(MultipleChoice(read_questions(str(path), "here")).results(language_model))
    assert evaluated["results"]["questions"]["acc,none"] == summarize_results(results)["accuracy"]
    for sample, mine in zip(evaluated["samples"]["questions"], results, strict=True):
        theirs = [float(response[0]) for response in sample["filtered_resps"]]
        assert theirs == pytest.approx(mine["loglikelihoods"], rel=SAME)


@pytest.mark.filterwarnings("ignore")
def test_harness_during_training_equals_own_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy of a staged model equals that of `eval.tasks`, in each evaluation that is
    due."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "questions.yaml").write_text(json.dumps(task))
    keys = ["train.steps=6", "eval.every=2", "eval.batches=0", "log.every=1"]
    keys += [f"run.dir={tmp_path}", "run.name=run", f"eval.harness_path={tmp_path / 'tasks'}"]
    keys += ["eval.harness_tasks=[questions]", "eval.harness_every=4"]
    keys += [f"eval.tasks.own.path={path}", "mesh.ici_stage=2", "mesh.ici_tensor=2"]
    assert main(["train", "quickstart", *keys]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = {record["step"]: record for record in map(json.loads, lines)}
    assert [step for step in records if "harness/questions/acc" in records[step]] == [4]
    assert records[4]["harness/questions/acc"] == records[4]["eval/own/accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_unknown_and_broken_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["train.steps=1", f"run.dir={tmp_path}", f"eval.harness_path={tmp_path}"]
    assert main(["train", "quickstart", *keys, "eval.harness_tasks=[hellaswagg]"]) == 2
    assert "Set eval.harness_tasks=[hellaswag]" in capsys.readouterr().err
    (tmp_path / "broken.yaml").write_text('{"task": "broken", "dataset_path": "json"}')
    assert main(["train", "quickstart", *keys, "eval.harness_tasks=[broken]"]) == 2
    error = capsys.readouterr().err
    assert "cannot be loaded" in error and "Traceback" not in error


def test_rolling_loglikelihood_generation_and_chat_requests(model: Any) -> None:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    def instances(kind: str, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, arguments, 0)]

    ((whole,), (logprob, greedy)) = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", "one two")),
        model.loglikelihood(instances("loglikelihood", "", "one two"))[0],
    )
    assert whole == pytest.approx(logprob, rel=SAME) and greedy is False
    (text,) = model.generate_until(
        instances("generate_until", "one", {"max_gen_toks": 4, "until": []})
    )
    assert isinstance(text, str)
    assert not model._texts.is_chat
    chat = model.apply_chat_template([{"role": "user", "content": "one"}])
    assert "one" in chat and model.chat_template(True) and model.tokenizer_name
    assert model._texts.is_chat and model._texts.encode("<|turn|>") == [2]


def test_unknown_config_key_is_rejected(folder: Path) -> None:
    from maxpipe.evals.harness import HarnessModel

    overrides: dict[str, Any] = {"model.layers": 3}
    with pytest.raises(ConfigError, match=r"model\.layers"):
        HarnessModel(str(folder / "hf"), **overrides)
