"""Time tokenization with `datasets.map`. benchmarks/data.py runs this script.

python data_oracle.py LINES TOKENIZER_FOLDER PROCESSES library|transformers
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import datasets


def main() -> None:
    lines, folder, processes, way = sys.argv[1:]
    if way == "transformers":
        from transformers import PreTrainedTokenizerFast

        whole = PreTrainedTokenizerFast.from_pretrained(folder)

        def encode(batch):
            return whole(batch["text"], add_special_tokens=False)
    else:
        from tokenizers import Tokenizer

        bare = Tokenizer.from_file(f"{folder}/tokenizer.json")

        def encode(batch):
            found = bare.encode_batch(batch["text"], add_special_tokens=False)
            return {"input_ids": [each.ids for each in found]}

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        texts = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=cache)
        start = time.perf_counter()
        ids = texts.map(encode, batched=True, num_proc=int(processes), remove_columns=["text"])
        seconds = time.perf_counter() - start
        tokens = sum(map(len, ids[:]["input_ids"]))
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
