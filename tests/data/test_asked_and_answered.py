"""Records of questions with answers, read as text: the suggestion reads both."""

from __future__ import annotations

import re

import pytest

from maxpipe.data.formats.text_of import BadRecord, TextOf


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("prompt", "completion"),
        ("question", "answer"),
        ("instruction", "output"),
        ("instruction", "response"),
    ],
)
def test_the_suggestion_reads_question_and_answer(asked: str, answered: str) -> None:
    record = {asked: "What?", answered: "That.", "other": "x"}
    with pytest.raises(BadRecord) as error:
        TextOf()(record)
    found = re.search(r"data\.template='([^']*)'", error.value.action)
    assert found is not None
    assert TextOf(template=found[1])(record) == "What?\nThat."
    assert f"data.prompt_field={asked} data.response_field={answered}." in error.value.action
