"""`maxpipe generate` on a run that was trained with four pipeline stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint.lock import RunLock
from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.sharding import AxisRules
from tests.conftest import FAST_COMPILE
from tests.errors import assert_error, without_codes
from tests.train.conftest import ROOT
from tests.train.runs import SAME, Run, Start, is_explained, saved, state_of, wait_for


def lines_of(output: str) -> list[dict[str, Any]]:
    """Return the parsed JSON lines of a command's output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def best_tokens(
    folder: Path, prompts: list[bytes], count: int
) -> list[tuple[list[int], list[float]]]:
    """Decode greedily with a full forward pass per token; return tokens and log-probabilities."""
    import jax
    import jax.numpy as jnp

    config = load([str(folder / "config.yml")]).config
    decoder = Decoder(config.model, AxisRules.from_config(config.mesh))
    params = dict(saved(folder).state["params"])
    params["layers"] = {"layer": params["layers"]}
    apply, room, found = jax.jit(decoder.apply), 1 + max(map(len, prompts)) + count, []
    for prompt in prompts:
        row, nats = [256, *prompt], []
        for _ in range(count):
            held = jnp.asarray([row + [0] * (room - len(row))])
            batch = {"tokens": held, "segment_ids": jnp.ones_like(held)}
            scores = apply(params, batch | {"positions": jnp.arange(room)[None]})[0, len(row) - 1]
            row.append(int(scores.argmax()))
            nats.append(float(jax.nn.log_softmax(scores).max()))
        found.append((row[-count:], nats))
    return found


def test_generate_matches_reference_decoding(uninterrupted: Path, run: Run, tmp_path: Path):
    """Prompts of different lengths, on one device, from a run trained with four stages."""
    prompts = [b"the", b"a", b"no hid"]
    (tmp_path / "prompts.txt").write_bytes(b"\n\n".join(prompts) + b"\n")
    before = state_of(uninterrupted.parent)
    given = ("--prompts", tmp_path / "prompts.txt", "--max-tokens", 7, "--temperature", 0)
    with RunLock(uninterrupted):
        output = run("generate", uninterrupted, *given, "--json", "--logprobs")
    assert set(before) == set(state_of(uninterrupted.parent))
    found = lines_of(output)
    assert [each["prompt"].encode() for each in found] == prompts
    for each, (wanted, nats) in zip(found, best_tokens(uninterrupted, prompts, 7), strict=True):
        assert each["tokens"] == wanted and each["finish_reason"] == "length"
        assert each["text"] == bytes(wanted).decode()
        assert each["logprobs"] == pytest.approx(nats, rel=SAME)


@pytest.mark.faults
def test_generate_is_equal_on_every_mesh(uninterrupted: Path, run: Run):
    """Compare batch size 1 with a batch sharded over data and tensor."""
    prompts = ("--prompt", "sand", "--prompt", "", "--prompt=-- the")
    options = (*prompts, "--seed", 3, "--top-k", 20, "--max-tokens", 9, "--json")
    one = run("generate", f"{uninterrupted}@12", *options, "--batch-size", 1)
    mesh = ("mesh.cpu_devices=4", "mesh.ici_data=2", "mesh.ici_tensor=2")
    whole = "mesh.axis_rules={kv_heads: []}"
    assert lines_of(one) == lines_of(run("generate", f"{uninterrupted}@12", *options, *mesh, whole))
    assert len({each["text"] for each in lines_of(one)}) == 3


@pytest.mark.long
def test_generate_stops_at_first_interrupt(uninterrupted: Path, start: Start):
    """The text generated so far is printed, and no device computes when Python exits."""
    long = ("--max-tokens", 100_000, "train.sequence_length=110000")
    process = start("generate", uninterrupted, "--prompt", "the", *long)
    assert process.stdout is not None
    output = wait_for(process, "restoring")[-1] + process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in output
    assert output.startswith("restoring") and output.endswith("\n")


@pytest.mark.faults
@pytest.mark.parametrize("after", [0.0, 2.0, 4.0])
def test_generate_prints_interrupted_completions(uninterrupted: Path, start: Start, after: float):
    prompts = ("--prompt", "the", "--prompt", "a", "--json")
    long = ("--max-tokens", 100_000, "train.sequence_length=110000")
    process = start("generate", uninterrupted, *prompts, *long)
    wait_for(process, "restoring")
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    if after:  # after 0 s, the parameters may not be restored yet
        assert [each["finish_reason"] for each in lines_of(output)] == ["interrupted"] * 2


@pytest.mark.long
def test_generate_interactive_reads_prompts_from_stdin(uninterrupted: Path):
    """One prompt per line; an invalid prompt or a closed stdout does not make the command fail."""
    command = [sys.executable, "-m", "maxpipe", "generate", str(uninterrupted), "--interactive"]
    given = b"the\n\xff\n\n" + b"x" * 16 + b"\nand\n"
    environment = os.environ | FAST_COMPILE | {"PYTHONPATH": str(ROOT)}
    options = ["--json", "--max-tokens", "3", "--stop", "e"]
    ran = subprocess.run([*command, *options], input=given, capture_output=True, env=environment)
    errors = ran.stderr.decode()
    assert ran.returncode == 0, errors
    assert [each["prompt"] for each in lines_of(ran.stdout.decode())] == ["the", "and"]
    assert_error(errors, "prompt 2", names="UTF-8")
    assert_error(errors, "prompt 3", "'xxxxxxxxxxxxxxxx'", [17, 16], "train.sequence_length=34")
    process = subprocess.Popen(
        [*command, "--max-tokens", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    errors = process.communicate(b"the\nand\n", timeout=60)[1].decode()
    assert process.returncode == 0 and "Traceback" not in errors


GENERATE_MISTAKES = {
    "{}@13 --prompt x": "must be one of the saved steps: 4, 8, 12, 16, 20, 24.",
    "{}/none --prompt x": "none",
    "{}": "one of the arguments --prompt --prompts --interactive is required",
    "{} --prompt x --prompts y": "not allowed with argument",
    "{} --prompts EMPTY": "at least one non-blank line",
    "{} --prompts nowhere": "must be a readable file: No such file or directory.",
    "{} --prompts .": "must be a readable file: Is a directory.",
    "{} --prompts LINES": "LINES.jsonl, line 2\n  must be an object with a string `prompt`",
    "{} --prompt 0123456789abcdef": "has 17 tokens including control tokens",
    "{} --prompt x --temperature -1": "--temperature = -1.0\n  must be at least 0.",
    "{} --prompt x --temperature nan": "must be at least 0.",
    "{} --prompt x --temperature 0 --top-p 0.9": "has no effect with --temperature 0",
    "{} --prompt x --top-p 0": "must be above 0 and at most 1.",
    "{} --prompt x --min-p 1.5": "must be from 0 to 1.",
    "{} --prompt x --repetition-penalty 0": "must be from 0.001 to 1000.",
    "{} --prompt x --repetition-penalty 1e-40": "must be from 0.001 to 1000.",
    "{} --prompt x --max-tokens 0": "0 is below the minimum of 1",
    "{} --prompt x --seed -1": "must be from 0 to 4294967295.",
    "{} --prompt x --stop=": "must not be empty",
    "{} --prompt x --topk 3": "Write --top-k 3.",
    "{} --prompt x runtime.num_processes=0": "must be 1, because generation runs in one process",
    "{} --prompt x tokenizer.kind=huggingface tokenizer.path=gone.json": "gone.json",
}


@pytest.mark.parametrize("arguments", GENERATE_MISTAKES)
def test_generate_rejects_invalid_arguments(
    arguments: str, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "EMPTY").write_text("\n \n")
    (tmp_path / "LINES.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    given = [word.format(uninterrupted) for word in arguments.split()]
    named = {"EMPTY": str(tmp_path / "EMPTY"), "LINES": str(tmp_path / "LINES.jsonl")}
    assert main(["generate", *(named.get(word, word) for word in given)]) == 2
    output = capsys.readouterr().err
    is_explained(output)
    assert GENERATE_MISTAKES[arguments] in without_codes(output)
