"""Run fixtures shared with tests/train."""

from tests.train.conftest import run, start, tiny

__all__ = ["run", "start", "tiny"]
