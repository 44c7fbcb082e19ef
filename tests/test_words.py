"""Numbers with units, and sentences of help texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from maxpipe import cli
from maxpipe.words import millions, scaled, sentence


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (9_216, "9,216"),
        (50_000, "0.05 M"),
        (852_000, "0.852 M"),
        (1_641_000, "1.64 M"),
        (999_600_000, "1 B"),
        (8_030_261_248, "8.03 B"),
        (405_853_388_800, "406 B"),
    ],
)
def test_parameters_have_three_digits(count: int, text: str):
    assert millions(count) == text


def test_operations_have_a_prefix():
    assert scaled(2.135e10, "FLOP") == "21.35 GFLOP"
    assert scaled(6.007e15, "FLOP") == "6.007 PFLOP"
    assert scaled(999_960.0, "FLOP") == "1 MFLOP" and scaled(0, "FLOP") == "0 FLOP"


def test_a_sentence_keeps_other_capitals():
    assert sentence("run on SLURM, TPU VMs or GKE") == "Run on SLURM, TPU VMs or GKE"


_NAMES = "SLURM TPU GPU CPU GKE VMs SVG PNG CSV JSON JAX PEFT UTF-8 URL TensorBoard Perfetto XLA"


def _pages(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    yield parser.prog, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _pages(inner)


def test_helps_spell_names_as_their_owners_do():
    wrong = [
        (command, word)
        for command, page in _pages(cli._parser())
        for name in _NAMES.split()
        for word in re.findall(rf"(?<![-./=\\w]){name}(?![-./=:\\w])", page, re.I)
        if word not in (name, name.upper()) and not re.search(rf"(?m)^ +{word} ", page)
    ]
    assert not wrong
