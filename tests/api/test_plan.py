"""Plans equal the output of the command."""

from __future__ import annotations

import json
from typing import Any

import pytest

import maxpipe
from maxpipe.cli import main
from maxpipe.errors import Code
from tests.errors import assert_error


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("arguments", [["llama3-8b", "--topology", "h100:1"], ["quickstart"]])
def test_plan_equals_output_of_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = maxpipe.plan(arguments[0], topology=arguments[2] if len(arguments) > 2 else None)
    assert main(["plan", *arguments, "--json"]) == 0
    assert json.loads(json.dumps(plan.values)) == json.loads(capsys.readouterr().out)
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert plan.total_bytes >= sum(plan.terms.values()) > 0.9 * plan.total_bytes
    assert plan.seconds == sum(plan.parts.values())
    assert plan.svg().startswith("<svg") and plan.svg() != plan.svg(timeline=True)


@pytest.mark.usefixtures("home")
def test_plan_that_does_not_fit_lists_changes() -> None:
    plan = maxpipe.plan("llama3-8b", "mesh.ici_data=8", topology="h100:8")
    assert not plan.fits and plan.changes
    assert plan.num_devices == 8 and plan.topology == "h100:8, 8 devices"


def test_mesh_that_does_not_match_devices_names_both() -> None:
    with pytest.raises(maxpipe.ConfigError, match="cpu:4"):
        maxpipe.plan("quickstart", devices=4)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"topology": 5}, "topology"),
        ({"topology": "h100:1", "slices": 1.5}, "slices"),
        ({"topology": "h100:1", "slices": 0}, "slices"),
        ({"devices": "2"}, "devices"),
        ({"devices": -1}, "devices"),
    ],
)
def test_argument_of_other_type_is_config_error(more: dict[str, Any], key: str) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.plan("quickstart", **more)
    assert_error(error.value, f"plan: {key}", code=Code.API_ARGUMENT)
