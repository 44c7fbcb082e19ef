"""The fake hub of the tests of `maxpipe fetch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from maxpipe.huggingface import hub_client
from maxpipe.io import redact
from tests.hub import TOKEN, Hub, model, served_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that `HF_ENDPOINT` names, for this process."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    with served_hub() as served:
        served.token = TOKEN
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(hub_client, "FIRST_PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(redact, "_registered_secrets", ())
        served.models["org/name"] = model()
        yield served
        huggingface_hub.close_session()
