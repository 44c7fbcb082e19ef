"""Preference records: trained tokens, truncation, and packing of pairs into rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.cli import main
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data import corpus, loader
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.packing import pack_documents
from maxpipe.data.pairs import DROPPED, IDENTICAL, TRUNCATED, PairEncoder
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError
from tests.data.conversations import (
    CHATML,
    Listed,
    messages_of,
    without_blocks,
    write_records,
)
from tests.data.test_fitting import STRATEGIES

BEGIN, END = 256, 257


def pairs_of(records: list[Any], tmp_path: Path, room: int = 1000, **keys: Any) -> PairEncoder:
    template = keys.pop("template", "")
    if template:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        keys["chat_template"] = str(path)
    config = DataConfig(chat="pairs", **keys)
    return PairEncoder(Listed(records), ByteTokenizer(), config, room - 1)


def encoded(record: Any, tmp_path: Path, room: int = 1000, **keys: Any) -> EncodedDocument:
    return pairs_of([record], tmp_path, room, **keys).encode(0)


def halves(found: EncodedDocument) -> list[tuple[str, str]]:
    """Return (text, trained text) of each response, with BOS and EOS as ^ and $."""
    assert found.trained is not None
    shown = {BEGIN: "^", END: "$"}
    parts = []
    for inside in (slice(0, found.second_half_start), slice(found.second_half_start, None)):
        ids, mask = found.ids[inside].tolist(), found.trained[inside]
        texts = [shown.get(i) or bytes([i]).decode("latin1") for i in ids]
        parts.append(("".join(texts), "".join(itertools.compress(texts, mask))))
    return parts


def record(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# --- halves ------------------------------------------------------------------------------------


def test_plain_text_pairs_are_encoded_verbatim(tmp_path: Path) -> None:
    found = encoded(record("2+2=", "4", "five"), tmp_path)
    assert halves(found) == [("^2+2=4$", "4$"), ("^2+2=five$", "five$")]
    assert found.second_half_start == 7 and found.marks == 0


def test_empty_response_contains_only_eos(tmp_path: Path) -> None:
    assert halves(encoded(record("a", "", "b"), tmp_path)) == [("^a$", "$"), ("^ab$", "b$")]


ASKED = messages_of(("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?"))


@pytest.mark.parametrize("template", [CHATML, without_blocks(CHATML)], ids=["blocks", "prefixes"])
def test_message_pairs_use_chat_template(template: str, tmp_path: Path) -> None:
    """Assistant messages in the prompt are not trained on."""
    pair = record(ASKED, messages_of(("assistant", "2")), messages_of(("assistant", "Two!")))
    found = encoded(pair, tmp_path, template=template)
    (chosen, mine), (rejected, other) = halves(found)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    assert chosen.startswith(start) and rejected.startswith(start)
    newline = "" if "generation %}" in template.replace("add_generation", "") else "\n"
    assert (mine, other) == (f"2<|im_end|>{newline}", f"Two!<|im_end|>{newline}")
    # Whole conversations and plain-text responses are encoded identically.
    whole = {"chosen": [*ASKED, *pair["chosen"]], "rejected": [*ASKED, *pair["rejected"]]}
    forms: list[tuple[Any, dict[str, Any]]] = [(whole, {"prompt_field": ""})]
    for other_record, keys in [*forms, (record(ASKED, "2", "Two!"), {})]:
        again = pairs_of([other_record], tmp_path, template=template, **keys).encode(0)
        assert (
            again.ids.tolist() == found.ids.tolist()
            and again.second_half_start == found.second_half_start
        )
        assert (again.trained == found.trained).all()


def test_multi_message_response_trains_assistant_turns(tmp_path: Path) -> None:
    chosen = messages_of(("assistant", "Which?"), ("user", "This."), ("assistant", "Yes"))
    pair = record(messages_of(("user", "Is it?")), chosen, messages_of(("assistant", "No")))
    (_, mine), _ = halves(encoded(pair, tmp_path, template=CHATML))
    assert mine == "Which?<|im_end|>Yes<|im_end|>"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Say: yes", "Say: no", "Say:"),  # a space belongs to the following word
        ("ab", "ac", "a"),
        ("x", "y", ""),
        ("same start", "same", "same"),
    ],
)
def test_common_prefix_is_used_as_prompt(
    chosen: str, rejected: str, prompt: str, tmp_path: Path
) -> None:
    found = encoded({"chosen": chosen, "rejected": rejected}, tmp_path, prompt_field="")
    wanted = [(f"^{each}$", f"{each[len(prompt) :]}$") for each in (chosen, rejected)]
    assert halves(found) == wanted


def test_identical_responses_are_marked(tmp_path: Path) -> None:
    assert encoded(record("a", "b", "b"), tmp_path).marks == IDENTICAL
    whole = [*ASKED, *messages_of(("assistant", "2"))]
    pair = {"chosen": whole, "rejected": whole}
    found = encoded(pair, tmp_path, template=CHATML, prompt_field="")
    assert found.marks == IDENTICAL and halves(found)[0][1] == "2<|im_end|>"


# --- too long ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "room", "kept"),
    [
        ((6, 6), 20, (6, 6)),
        ((6, 6), 12, (6, 6)),
        ((6, 6), 11, (6, 5)),
        ((9, 4), 10, (6, 4)),
        ((4, 9), 10, (4, 6)),
        ((9, 9), 10, (5, 5)),
        ((9, 5), 9, (5, 4)),
    ],
)
def test_longer_response_is_truncated_first(
    sizes: tuple[int, int], room: int, kept: tuple[int, int], tmp_path: Path
) -> None:
    """Sizes include BOS, EOS and a prompt of one character."""
    chosen, rejected = "c" * (sizes[0] - 3), "r" * (sizes[1] - 3)
    found = encoded(record("p", chosen, rejected), tmp_path, room)
    assert (found.second_half_start, len(found.ids) - found.second_half_start) == kept
    assert found.marks == (TRUNCATED if sum(sizes) > room else 0)
    for (text, _), response in zip(halves(found), (chosen, rejected), strict=True):
        assert f"^p{response}$".startswith(text)


def test_truncation_can_make_responses_identical(tmp_path: Path) -> None:
    found = encoded(record("p", "aaaab", "aaaac"), tmp_path, 8)
    assert found.marks == TRUNCATED | IDENTICAL


def test_pair_without_remaining_response_is_dropped(tmp_path: Path) -> None:
    for keys in ({}, {"long_pairs": "drop"}):
        found = encoded(record("p" * 30, "c", "r"), tmp_path, 40, **keys)
        assert len(found.ids) == found.second_half_start == 0 and found.marks == DROPPED


def test_long_pair_with_error_policy_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sequence of 10 tokens") as error:
        encoded(record("pppp", "c", "r"), tmp_path, 10, long_pairs="error")
    assert error.value.problems[0].value == "7 + 7 tokens"
    encoded(record("pppp", "c", "r"), tmp_path, 14, long_pairs="error")


# --- rejected records --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "keys", "rule"),
    [
        ({"chosen": "a", "rejected": "b"}, {}, "data.prompt_field"),
        ({"prompt": "a", "rejected": "b"}, {}, "data.chosen_field"),
        ({"prompt": "a", "chosen": "b"}, {}, "data.rejected_field"),
        ("just a text", {}, "must be an object if data.chat="),
        (record("a", 3, "b"), {}, "data.chosen_field"),
        (record(None, "b", "c"), {}, "data.prompt_field"),
        (record([], [], messages_of(("assistant", "b"))), {}, "chosen has no message"),
        (record("a", messages_of(("robot", "b")), "c"), {}, "data.chat_roles"),
        (record(messages_of(("user", "a")), "b", "c"), {"template": ""}, "chat template"),
        ({"chosen": "ab", "rejected": "ab"}, {"prompt_field": ""}, "they are identical"),
        (
            record(messages_of(("user", "a")), messages_of(("user", "b")), "c"),
            {},
            "chosen has no token to train on",
        ),
        (
            {"chosen": [], "rejected": messages_of(("user", "a"))},
            {"prompt_field": ""},
            "no message",
        ),
        ({"chosen": 1, "rejected": 2}, {"prompt_field": ""}, "data.chosen_field"),
    ],
)
def test_invalid_pair_record_is_named(
    bad: Any, keys: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    keys = {"template": CHATML, **keys}
    made = pairs_of([record("a", "b", "c"), bad], tmp_path, **keys)
    made.encode(0)
    with pytest.raises(ConfigError) as error:
        made.encode(1)
    [problem] = error.value.problems
    assert problem.where == "records.jsonl:2" and rule in problem.rule
    assert problem.action.endswith(".")


def test_missing_prompt_suggests_empty_prompt_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.prompt_field=''"):
        encoded({"chosen": "a", "rejected": "b"}, tmp_path)


# --- rows --------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 26), min_size=1, max_size=40).map(lambda each: np.array(each))


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 25), st.integers(1, 9), st.sampled_from(STRATEGIES))
def test_rows_respect_document_and_token_limits(
    lengths: Any, tokens: int, most: int, strategy: Any
) -> None:
    lengths = np.minimum(lengths, tokens + 1)
    plan = pack_documents(lengths, np.arange(len(lengths)), tokens, strategy, most)
    counts = np.diff(plan.starts)
    assert (counts <= most).all()
    assert sorted(plan.documents.tolist()) == np.flatnonzero(lengths > 1).tolist()
    for first, last in itertools.pairwise(plan.starts):
        assert lengths[plan.documents[first:last]].sum() <= tokens + 1


WORDS = ("yes", "no", "maybe so", "never", "of course not")


def words_of(count: int) -> list[dict[str, Any]]:
    return [
        record(f"Question {i}?", WORDS[i % 5] * (1 + i % 3), WORDS[(i + 2) % 5])
        for i in range(count)
    ]


def datasets(folder: Path, count: int = 30, **keys: Any) -> loader.Datasets:
    path = write_records(folder / "pairs.jsonl", words_of(count))
    given = {"source": "jsonl", "path": str(path), "chat": "pairs", "packing": "best_fit"}
    config = DataConfig(
        **{**given, "validation_fraction": 0.1, "max_pairs_per_sequence": 3, **keys}
    )
    return loader.build_loaders(
        config, TokenizerConfig(), seed=3, batch_size=2, sequence_length=120
    )


@pytest.mark.parametrize("packing", ["best_fit", "first_fit", "pad"])
def test_both_responses_are_in_same_row(packing: str, tmp_path: Path) -> None:
    found = datasets(tmp_path, packing=packing).train
    [documents] = found.pairs.values()
    documents.reference = np.arange(60, dtype=np.float32).reshape(30, 2)
    seen: list[int] = []
    for step in range(found.num_batches):
        batch = found.batch(step)
        assert batch["pairs"].shape == (2, 3) and batch["reference"].shape == (2, 6)
        for at, row in enumerate(found.sequence_origins(step)):
            seen += row.documents
            count = len(row.documents)
            assert batch["pairs"][at].tolist() == [1.0] * count + [0.0] * (3 - count)
            numbers = batch["segment_ids"][at]
            assert numbers.max() == 2 * count
            wanted = documents.reference[row.documents].ravel().tolist()
            assert batch["reference"][at].tolist() == wanted + [0.0] * (6 - 2 * count)
            for half, document in enumerate(np.repeat(row.documents, 2).tolist()):
                inside = numbers == half + 1
                pair = words_of(30)[document]
                text = f"{pair['prompt']}{pair['chosen' if half % 2 == 0 else 'rejected']}"
                response = len(text) - len(pair["prompt"]) + 1  # and EOS
                assert batch["positions"][at][inside].tolist() == list(range(inside.sum()))
                ids = batch["tokens"][at][inside].tolist()
                assert [BEGIN, *text.encode(), END][: len(ids)] == ids
                assert batch["loss_mask"][at][inside].sum() == response
                assert batch["response_tokens"][at][half] == response
            assert batch["response_tokens"][at][2 * count :].sum() == 0
    if packing != "pad":
        assert max(len(row.documents) for row in found.sequence_origins(0)) > 1
    assert len(set(seen)) == 27


def test_padding_rows_have_no_pairs(tmp_path: Path) -> None:
    found = datasets(tmp_path, packing="pad").validation
    assert found is not None and found.num_batches == 2
    last = found.batch(1)
    assert last["pairs"].tolist() == [[1, 0, 0], [0, 0, 0]] and not last["loss_mask"][1].any()


def test_pair_settings_change_fingerprint(tmp_path: Path) -> None:
    one = datasets(tmp_path).train.fingerprint()
    assert one["pairs_per_row"] == 3  # checkpoints keep the original name of this entry
    changes: list[dict[str, Any]] = [{"long_pairs": "drop"}, {"max_pairs_per_sequence": 4}]
    for keys in changes:
        other = datasets(tmp_path, **keys).train.fingerprint()
        assert corpus.compare_fingerprints(one, other)


def test_long_pairs_are_reported(tmp_path: Path) -> None:
    pairs = [record("q", "a" * 9, "b"), record("q" * 90, "a", "b"), record("q", "a", "a")]
    path = write_records(tmp_path / "long.jsonl", [*pairs, record("q", "a" * 70, "b")])
    config = DataConfig(
        source="jsonl", path=str(path), chat="pairs", packing="pad", validation_fraction=0
    )
    found = loader.build_loaders(
        config, TokenizerConfig(), seed=0, batch_size=1, sequence_length=60
    )
    assert found.remarks == [
        "data: 1 of 4 pairs are longer than a sequence and are truncated: see data.long_pairs",
        "data: 1 of 4 pairs are longer than a sequence and are dropped: see data.long_pairs",
        "data: 1 of 4 pairs have two identical responses and do not affect training",
    ]
    assert len(found.train.sequences) == 3


@pytest.mark.parametrize(
    ("pair", "keys", "rule", "action"),
    [
        (
            record("q" * 90, "a", "b"),
            {"long_pairs": "drop"},
            "each of 1 pair is longer than a sequence of 61 tokens",
            "data.long_pairs=truncate",
        ),
        (
            record("q" * 90, "a", "b"),
            {},
            "in each of 1 pair, the prompts alone fill a sequence of 61 tokens",
            "shorten the prompts",
        ),
        (
            record("q", "", ""),
            {},
            "must contain responses: found 1 pair, all empty",
            "data.rejected_field",
        ),
    ],
)
def test_no_remaining_pairs_is_rejected(
    tmp_path: Path, pair: Any, keys: dict[str, Any], rule: str, action: str
) -> None:
    path = write_records(tmp_path / "left.jsonl", [pair])
    config = DataConfig(source="jsonl", path=str(path), chat="pairs", packing="pad", **keys)
    with pytest.raises(ConfigError) as error:
        loader.build_loaders(config, TokenizerConfig(), seed=0, batch_size=1, sequence_length=60)
    (problem,) = error.value.problems
    assert rule in problem.rule and action in problem.action


# --- commands ----------------------------------------------------------------------------------


def test_data_show_labels_chosen_and_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "a.jsonl", words_of(6))
    inputs = ["quickstart", "data.source=jsonl", "data.path=a.jsonl", "data.chat=pairs"]
    inputs += ["data.packing=best_fit", "train.sequence_length=128", "train.objective=preference"]
    assert main(["data", "show", *inputs, "-n", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "pairs, " in head or "1 pair, " in head
    first = next(number for number, line in enumerate(lines) if line.startswith("---"))
    assert " chosen, " in lines[first] and "a.jsonl:" in lines[first]
    assert lines[first + 1].startswith("⟦<begin>⟧⟦Question ")
    assert lines[first + 1].endswith("<end>")
    assert " rejected, " in lines[first + 2]
    assert main(["data", "find", *inputs[:1], "1", "0", *inputs[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["documents"]
    assert [each["half"] for each in found[:2]] == ["chosen", "rejected"]
    assert main(["data", "stats", *inputs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 6
