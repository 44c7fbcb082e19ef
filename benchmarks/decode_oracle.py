"""Create a Llama model and generate tokens on request, in an environment with transformers.

`decode.py` runs `decode_oracle.py TASK`. The script first prints `ready`. For each line on standard
input, it then prints one line of JSON with `seconds` and `tokens`.
"""

from __future__ import annotations

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    task = json.loads(sys.argv[1])
    transformers.logging.set_verbosity_error()
    torch.manual_seed(task["seed"])
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**task["config"])).eval()
    model.save_pretrained(task["folder"])
    model.generation_config.eos_token_id = None  # never stop before the requested number of tokens
    prompts = torch.tensor(task["prompts"])
    mask = torch.ones_like(prompts)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        with torch.no_grad():
            found = model.generate(
                prompts, attention_mask=mask, max_new_tokens=task["more"], do_sample=False
            )
        seconds = time.perf_counter() - start
        tokens = found[:, prompts.shape[1] :].tolist()
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
