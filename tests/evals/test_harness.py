"""lm-evaluation-harness evaluates a model; skipped if the harness is not installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

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
    before = model._texts.encoded("<|turn|>")
    chat = model.apply_chat_template([{"role": "user", "content": "one"}])
    assert "one" in chat and model.chat_template(True) and model.tokenizer_name
    assert len(model._texts.encoded("<|turn|>")) < len(before), (
        "<|turn|> must be a control token now"
    )


def test_unknown_config_key_is_rejected(folder: Path) -> None:
    from maxpipe.evals.harness import HarnessModel

    overrides: dict[str, Any] = {"model.layers": 3}
    with pytest.raises(ConfigError, match=r"model\.layers"):
        HarnessModel(str(folder / "hf"), **overrides)
