"""Fixtures of runs that the tests of this folder share with tests/train."""

from tests.train.conftest import fork_server, run, start, tiny

__all__ = ["fork_server", "run", "start", "tiny"]
