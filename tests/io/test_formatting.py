"""Formatting of numbers with units and of help texts."""

from __future__ import annotations

import pytest

from maxpipe import cli
from maxpipe.io.formatting import capitalize_first, format_count, format_duration, format_si


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
def test_format_count_has_three_significant_digits(count: int, text: str):
    assert format_count(count) == text


def test_format_si_uses_prefixes():
    assert format_si(2.135e10, "FLOP") == "21.35 GFLOP"
    assert format_si(6.007e15, "FLOP") == "6.007 PFLOP"
    assert format_si(999_960.0, "FLOP") == "1 MFLOP" and format_si(0, "FLOP") == "0 FLOP"


def test_capitalize_first_keeps_other_capitals():
    assert capitalize_first("run on SLURM, TPU VMs or GKE") == "Run on SLURM, TPU VMs or GKE"


def test_launch_help_keeps_capitalization_of_cluster_names():
    page = cli.command_line_parser()._subparsers._group_actions[0].choices["launch"].format_help()  # type: ignore
    assert "Start a run in local processes, or on SLURM, TPU VMs or GKE." in page


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.51, "1.51 s"), (0.0862, "86.2 ms"), (9.97e-5, "99.7 us"), (0.9996, "1 s"), (61.0, "61 s")],
)
def test_format_duration_selects_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
