"""Prompts of Hugging Face folders: IDs and greedy tokens equal those of transformers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.data.chat_spec import add_end_of_turn_ids
from maxpipe.data.prompts import user_chat
from maxpipe.generation.completions import encode_chats
from maxpipe.generation.load_model import open_model
from tests.huggingface import tokenizer_folders as kinds
from tests.huggingface.test_oracle import PYTHON, reason

pytestmark = pytest.mark.oracle

SCRIPT = Path(__file__).with_name("prompts_oracle.py")
PROMPTS = [
    *("the sea was wide", " two  spaces", "naïve 水\n\n12", "a </s><|im_end|><eos> b", "A"),
    *("</s> the", "the</s>the", "\n\nthe", " \U0001f600 the\n 12 345", "\u2581the"),
]
CHATS = ["A question of several words", " was it\ncold? "]

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
KINDS: dict[str, tuple[Callable[[Path], dict[str, int]], str, dict[str, Any]]] = {
    "llama3": (kinds.llama3, "Llama", {}),
    "qwen2": (kinds.qwen, "Qwen2", {}),
    "qwen3": (kinds.qwen, "Qwen3", {}),
    "gemma3": (kinds.gemma, "Gemma3", {"sliding_window": 16}),
    "llama2": (kinds.llama2, "Llama", {}),
    "llama2 legacy": (kinds.llama2_with(legacy=True), "Llama", {}),
    "llama2 without prefix": (kinds.llama2_with(add_prefix_space=False), "Llama", {}),
    "llama2 first": (kinds.llama2_first, "Llama", {}),
    "code llama": (kinds.llama2_with(tokenizer_class="CodeLlamaTokenizer"), "Llama", {}),
    "gpt2 class": (kinds.byte_level_with("GPT2Tokenizer"), "Llama", {}),
    "neox class": (kinds.byte_level_with("GPTNeoXTokenizer"), "Llama", {}),
    "cohere class": (kinds.byte_level_with("CohereTokenizer"), "Llama", {}),
    "llama class of bytes": (kinds.byte_level_with("LlamaTokenizerFast"), "Llama", {}),
    "qwen2 with another class": (kinds.byte_level_with("LlamaTokenizerFast"), "Qwen2", {}),
    "gemma without class": (kinds.gemma_without_class, "Gemma3", {"sliding_window": 16}),
    "mistral": (kinds.mistral, "Mistral", {"sliding_window": None}),
    "gpt-oss": (kinds.gpt_oss, "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": (kinds.phi3, "Phi3", {"pad_token_id": 0}),
    "map only": (kinds.mapped, "Llama", {}),
    "model file": (kinds.model_file(add_bos_token=True), "Llama", {}),
    "model file with end": (kinds.model_file(add_bos_token=True, add_eos_token=True), "Llama", {}),
    "bare model file": (kinds.model_file(), "Llama", {}),
    "legacy model file": (kinds.model_file(legacy=True), "Llama", {}),
    "mistral model file": (kinds.model_file(), "Mistral", {"sliding_window": None}),
    "new mistral model file": (kinds.model_file(legacy=False), "Mistral", {"sliding_window": None}),
}
WITHOUT_TEMPLATE = ("map only",)
ENDED = ("llama3", "qwen2", "gemma3")
"""Cases whose generation_config.json lists a token that the model generates as an end token."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The folder and transformers' results of each case."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base, jobs = tmp_path_factory.mktemp("prompts"), []
    for number, (name, (make, model, changes)) in enumerate(KINDS.items()):
        folder = base / name
        folder.mkdir()
        text_only = "Text" if model == "Gemma3" else ""
        roles = make(folder)
        exact = {"vocab_size": vocabulary(folder)} if name in ENDED else {}
        jobs.append(
            {
                "folder": str(folder),
                "config_class": f"{model}{text_only}Config",
                "architecture": f"{model}ForCausalLM",
                "config": {**SIZES, **roles, **changes, **exact},
                "seed": number,
                "prompts": PROMPTS,
                "conversations": []
                if name in WITHOUT_TEMPLATE
                else [messages(text) for text in CHATS],
                "end_at": 5 * (name in ENDED),
                "found": str(base / f"{name}.json"),
            }
        )
    listed = base / "jobs.json"
    listed.write_text(json.dumps(jobs))
    run = subprocess.run([PYTHON, SCRIPT, listed], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {each: (base / each, json.loads((base / f"{each}.json").read_text())) for each in KINDS}


def vocabulary(folder: Path) -> int:
    """Return the vocabulary size of a `tokenizer.json`."""
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = [*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])]
    return max(ids) + 1


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", KINDS)
def test_prompt_ids_equal_transformers(name: str, answers) -> None:
    folder, wanted = answers[name]
    tokenizer = open_model(folder, []).tokenizer
    assert [tokenizer.encode_prompt(text) for text in PROMPTS] == wanted["texts"]
    if wanted["chats"]:
        chats = encode_chats(
            [user_chat(text) for text in CHATS], add_end_of_turn_ids(tokenizer), 256
        )
        assert [each.ids for each in chats] == wanted["chats"]


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_equal_transformers(
    name: str, answers, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = answers[name]
    greedy = ["--json", "--temperature", "0", "--max-tokens", "16", "model.compute_dtype=float32"]
    for given, options, after in (
        (PROMPTS, [], wanted["after_texts"]),
        (CHATS, ["--chat"], wanted["after_chats"]),
    ):
        if not after:
            continue
        prompts = [word for text in given for word in ("--prompt", text)]
        assert main(["generate", str(folder), *prompts, *options, *greedy]) == 0
        found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
        assert found == after
    if name in ENDED:
        assert len(wanted["after_texts"][0]) <= 6
