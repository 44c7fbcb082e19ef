"""What `transformers` makes of conversations. Usage: chat_oracle.py FOLDER.

The folder is a tokenizer's, with jobs.json: templates by name, and conversations. Written is
answers.json: of each template, for each conversation, its ids and which of them are trained.
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
