"""How calls are held against signatures: an int will do for a float, as it does for Python."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
