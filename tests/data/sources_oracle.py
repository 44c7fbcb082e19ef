"""What `transformers` makes of random conversations. Usage: sources_oracle.py FOLDER.

The folder is a tokenizer's, with jobs.json: templates by name, and records. The script writes
answers.json: ids and trained tokens of each record for each template, or null where the template
refuses the record. Without generation blocks the trained part of a final answer is what follows
the prompt that a model is given, which is TRL's definition. Of a prompt that opens a block which
the answer lacks, as that of DeepSeek R1, it begins where another content would differ.
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
    # A prompt may open a block of reasoning that the record lacks: the answer then begins where
    # its content makes a difference.
    other = {**messages[-1], "content": "Zebra"}
    others = rendered(record, [*messages[:-1], other], template)["input_ids"]
    begin = min(alike(asked, ids), alike(others, ids))
    is_prefix = len(before) < begin and ids[: len(before)] == before
    return {"ids": ids, "last": begin if is_prefix else None}


def alike(one, other):
    """Number of tokens with which both begin."""
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
