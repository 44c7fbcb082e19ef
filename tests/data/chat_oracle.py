"""Encode conversations with `transformers`. Usage: chat_oracle.py FOLDER.

FOLDER contains a tokenizer and jobs.json, which holds templates by name and conversations. The
script writes answers.json: token IDs and assistant masks by template and conversation.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

folder = Path(sys.argv[1])
jobs = json.loads((folder / "jobs.json").read_text())
tokenizer = AutoTokenizer.from_pretrained(folder)
answers = {}
for name, template in jobs["templates"].items():
    answers[name] = []
    for messages in jobs["conversations"]:
        found = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        answers[name].append({"ids": found["input_ids"], "mask": found["assistant_masks"]})
(folder / "answers.json").write_text(json.dumps(answers))
