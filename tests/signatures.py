"""Type checker of function calls: an int is accepted for a float, as by Python type checkers."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
