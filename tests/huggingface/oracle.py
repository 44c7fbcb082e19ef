"""Reference results of transformers: makes folders and computes their logits.

Usage: oracle.py COMMAND JOBS, where COMMAND is make, logits, adapted, make_adapter, add_ahead,
ahead, train, losses, greedy or sft. JOBS is a JSON list of objects; `folder` is the Hugging Face
folder, `tokens` a file of token IDs `[rows, tokens]` and `logits` the file to write. For `adapted`,
which requires PEFT, `adapter` is an adapter folder. `make_adapter` writes that folder for the
PEFT config `lora`. The last four read `documents`, a JSON
file, and write `trained` or `gradients`, folders, or `found`, a JSON file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file  # pyright: ignore[reportMissingImports]

# Optimized kernels require sizes that are multiples of certain numbers.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def main() -> None:
    action, jobs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    transformers.logging.set_verbosity_error()
    for job in jobs:
        if action == "make":
            made(job).save_pretrained(job["folder"], max_shard_size=job["max_shard_size"])
        if action in AHEAD:
            AHEAD[action](job)
            continue
        if action in DOCUMENTS:
            DOCUMENTS[action](job, json.loads(Path(job["documents"]).read_text()))
            continue
        # Models are reloaded even if just made: saving them in another dtype rounded their buffers.
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=torch.float32, output_loading_info=True, **EAGER
        )
        assert not any(info.values()), info
        tokens = torch.from_numpy(np.load(job["tokens"]))
        if action == "adapted":
            from peft import PeftModel  # pyright: ignore[reportMissingImports]

            model = PeftModel.from_pretrained(model, job["adapter"])
            for name, folder in job.get("others", {}).items():  # the last one computes the logits
                model.load_adapter(folder, name)
                model.set_adapter(name)
        if action == "make_adapter":
            from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

            model = get_peft_model(model, LoraConfig(**job["lora"]))
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, 0.0, 0.2)
            model.save_pretrained(job["adapter"])
        with torch.no_grad():
            np.save(job["logits"], model.eval()(tokens, use_cache=False).logits.numpy())


def made(job: dict[str, Any]) -> Any:
    """Build a model whose weights, norms included, are drawn from the job's seed."""
    torch.manual_seed(job["seed"])
    config = getattr(transformers, job["config_class"])(**job["config"])
    for name, value in EAGER.items():
        setattr(config, f"_{name}", value)
    model = getattr(transformers, job["architecture"])(config)
    for name, tensor in model.state_dict().items():  # with buffers that are saved
        if name.endswith("tid2eid"):  # different experts for each token ID
            drawn = torch.rand(len(tensor), config.n_routed_experts).argsort()
            tensor.copy_(drawn[:, : tensor.shape[1]])
            continue
        # Scalars far below 1 would shrink the residual stream below the epsilon of the norms.
        tensor.normal_(1.0 if name.endswith("layer_scalar") else 0.0, 0.2)
    return model.to(getattr(torch, job["dtype"]))


def add_mtp(job: dict[str, Any]) -> None:
    """Add a multi-token prediction layer to a folder, as in the published Qwen3.5."""
    folder, width = Path(job["folder"]), job["config"]["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{job['config']['num_hidden_layers'] - 1}."
    shapes = {
        name.replace(last, "mtp.layers.0."): each.shape
        for name, each in tensors.items()
        if name.startswith(last)
    }
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    shapes |= {f"{name}.weight": (width,) for name in norms}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    dtype = tensors["model.embed_tokens.weight"].dtype
    for name, shape in shapes.items():
        tensors[name] = torch.normal(0.0, 0.2, tuple(shape)).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))


def mtp(job: dict[str, Any]) -> None:
    """Save the logits of Qwen3.5's multi-token prediction layer, which transformers ignores.

    The layer is one of transformers, with the weights of `mtp.layers.0`.
    """
    folder = Path(job["folder"])
    model, tensors = loaded(job).eval(), load_file(folder / "model.safetensors")
    config, inner = model.config, model.model
    weights = {name: each.float() for name, each in tensors.items() if name.startswith("mtp.")}

    def norm(name: str, x: Any) -> Any:
        own = type(inner.norm)(config.hidden_size, eps=config.rms_norm_eps)
        own.weight.data = weights[f"mtp.{name}.weight"]
        return own(x)

    prefix = "mtp.layers.0."
    layer = inner.layers[-1]
    assert layer.block_type == "full_attention"
    own = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
    tokens = torch.from_numpy(np.load(job["tokens"]))
    with torch.no_grad():
        last, later = inner(tokens, use_cache=False).last_hidden_state[:, :-1], tokens[:, 1:]
        layer.load_state_dict(fused(own, layer))
        both = norm("pre_fc_norm_embedding", inner.embed_tokens(later))
        both = torch.cat([both, norm("pre_fc_norm_hidden", last)], -1)
        x = both @ weights["mtp.fc.weight"].T
        places = torch.arange(1, tokens.shape[1])[None].expand(tokens.shape[0], -1)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        rotary = inner.rotary_emb(x, places[None].expand(3, -1, -1))
        x = layer(x, position_embeddings=rotary, attention_mask=mask)
        np.savez(job["logits"], model.lm_head(norm("norm", x)).numpy())


def fused(tensors: dict[str, Any], layer: Any) -> dict[str, Any]:
    """Stack experts that are stored separately, as the layer expects them."""
    names = ("gate_proj", "up_proj", "down_proj")
    if "mlp.experts.0.gate_proj.weight" not in tensors:
        return tensors
    found = {name: each for name, each in tensors.items() if ".experts." not in name}
    count = layer.mlp.experts.down_proj.shape[0]
    gate, up, down = (
        torch.stack([tensors[f"mlp.experts.{e}.{name}.weight"] for e in range(count)])
        for name in names
    )
    both = {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}
    return found | both


def add_ahead(job: dict[str, Any]) -> None:
    """Add multi-token prediction layers to a folder, as in the published DeepSeek-V3.

    They have the last layer's tensor names, and copies of the embedding and the head.
    """
    if "linear_num_key_heads" in job["config"]:
        add_mtp(job)
        return
    folder, count = Path(job["folder"]), job["config"]["num_nextn_predict_layers"]
    layers = job["config"]["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors")
    table, width = tensors["model.embed_tokens.weight"], job["config"]["hidden_size"]
    last = f"model.layers.{layers - 1}."
    shapes = {n.removeprefix(last): each.shape for n, each in tensors.items() if n.startswith(last)}
    shapes |= {f"{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = (width, 2 * width)
    for number in range(layers, layers + count):
        mine = f"model.layers.{number}."
        for name, shape in shapes.items():
            dtype = torch.float32 if "bias" in name else table.dtype
            tensors[mine + name] = torch.normal(0.0, 0.2, tuple(shape)).to(dtype)
        tensors[f"{mine}embed_tokens.weight"] = table.clone()
        tensors[f"{mine}shared_head.head.weight"] = tensors.get("lm_head.weight", table).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def ahead(job: dict[str, Any]) -> None:
    """Save the logits of the multi-token prediction layers for all tokens of each sequence."""
    if "linear_num_key_heads" in job["config"]:
        mtp(job)
        return
    layers, count = (job["config"][n] for n in ("num_hidden_layers", "num_nextn_predict_layers"))
    # By default, the ignored keys contain the layer numbers of the published model.
    for name in ("DeepseekV3", "DeepseekV32", "Glm4Moe", "GlmMoeDsa"):
        base = getattr(transformers, f"{name}PreTrainedModel")
        base._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{number}\..*" for number in range(layers, layers + count)
        ]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.float32, output_loading_info=True, **EAGER
    )
    assert not any(info.values()), info
    heads = transformers.modeling_layers.MtpModel.from_pretrained(model.eval()).eval()
    tokens, found = torch.from_numpy(np.load(job["tokens"])), []
    with torch.no_grad():
        last = model.model(tokens).last_hidden_state
        for number in range(count):
            later = tokens[:, number + 1 :]
            places = torch.arange(number + 1, tokens.shape[1])[None]
            last = heads.forward_layer(number, last[:, :-1], places, None, input_ids=later)
            found.append(model.lm_head(last).numpy())
    np.savez(job["logits"], *found)


AHEAD = {"add_ahead": add_ahead, "ahead": ahead}


def loaded(job: dict[str, Any]) -> Any:
    """Load the folder's model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.float32, **EAGER
    )


def loss(model: Any, documents: list[list[int]]) -> Any:
    """Return the summed next-token loss; each document is a separate sequence."""
    total = 0.0
    for document in documents:
        ids = torch.tensor([document])
        logits = model(ids[:, :-1]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total


def train(job: dict[str, Any], steps: list[list[list[int]]]) -> None:
    """Train with AdamW on the mean token loss of each step. Vectors, position biases and decay
    rates have no weight decay.
    """
    model = loaded(job).train()
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim > 1 and not name.endswith(("position_bias", "A_log"))
        groups[decays].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": job["weight_decay"]},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=job["learning_rate"],
        betas=tuple(job["betas"]),
        eps=job["epsilon"],
    )
    for documents in steps:
        optimizer.zero_grad()
        count = sum(len(document) - 1 for document in documents)
        (loss(model, documents) / count).backward()
        optimizer.step()
    model.save_pretrained(job["trained"])


def losses(job: dict[str, Any], documents: list[list[int]]) -> None:
    """Save the summed loss over all documents."""
    with torch.no_grad():
        found = float(loss(loaded(job).eval(), documents))
    Path(job["found"]).write_text(json.dumps(found))


def greedy(job: dict[str, Any], prompts: list[list[int]]) -> None:
    """Save the greedy continuation of each prompt."""
    model, found = loaded(job).eval(), []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            for _ in range(job["count"]):
                last = model(ids, use_cache=False).logits[:, -1]
                ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
            found.append(ids[0, len(prompt) :].tolist())
    Path(job["found"]).write_text(json.dumps(found))


def sft(job: dict[str, Any], conversations: list[Any]) -> None:
    """Save the mean loss over the assistant tokens of all conversations, and its gradients."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["tokenizer"])
    model, total, count = loaded(job), torch.zeros(()), 0
    for messages in conversations:
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = (torch.tensor(found[each]) for each in ("input_ids", "assistant_masks"))
        labels = torch.where(mask.bool(), ids, -100)[None]
        mine = int((labels[:, 1:] != -100).sum())
        if mine:
            total = total + model(ids[None], labels=labels).loss * mine
            count += mine
    (total / count).backward()
    Path(job["found"]).write_text(json.dumps([float(total / count), count]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(job["gradients"])


DOCUMENTS = {"train": train, "losses": losses, "greedy": greedy, "sft": sft}


if __name__ == "__main__":
    main()
