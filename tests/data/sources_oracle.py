"""Encode random conversations with `transformers`. Usage: sources_oracle.py FOLDER.

FOLDER contains a tokenizer and jobs.json, which holds templates by name and records. The script
writes answers.json: token IDs and trained tokens by template and record, or null if the template
rejects the record. Without generation blocks, the trained part of a final answer follows the
generation prompt, as in TRL. If the generation prompt opens a block that the answer lacks, as
for DeepSeek R1, the trained part begins at the first token that depends on the answer's content.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

folder = Path(sys.argv[1])
jobs = json.loads((folder / "jobs.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(folder)


def rendered(record, messages, template, **options):
    return tokenizer.apply_chat_template(
        messages,
        tools=record.get("tools"),
        chat_template=template,
        return_dict=True,
        **record.get("chat_template_kwargs", {}),
        **options,
    )


def answer(record, template):
    messages = record["messages"]
    if "generation %}" in template:
        found = rendered(record, messages, template, return_assistant_tokens_mask=True)
        return {"ids": found["input_ids"], "mask": found["assistant_masks"]}
    ids = rendered(record, messages, template)["input_ids"]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return {"ids": ids, "last": None}
    try:
        asked = rendered(record, messages[:-1], template, add_generation_prompt=True)["input_ids"]
        before = rendered(record, messages[:-1], template)["input_ids"]
    except Exception:
        return {"ids": ids, "last": None}
    if ids[: len(asked)] == asked:
        return {"ids": ids, "last": len(asked)}
    # A generation prompt may open a reasoning block that the record lacks. The answer then begins
    # at the first token that depends on its content.
    other = {**messages[-1], "content": "Zebra"}
    others = rendered(record, [*messages[:-1], other], template)["input_ids"]
    begin = min(common_prefix_length(asked, ids), common_prefix_length(others, ids))
    is_prefix = len(before) < begin and ids[: len(before)] == before
    return {"ids": ids, "last": begin if is_prefix else None}


def common_prefix_length(one, other):
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((n for n, (left, right) in enumerate(pairs) if left != right), shorter)


answers = {}
for name, template in jobs["templates"].items():
    answers[name] = []
    for record in jobs["records"]:
        try:
            answers[name].append(answer(record, template))
        except Exception:
            answers[name].append(None)
(folder / "answers.json").write_text(json.dumps(answers))
