"""`python -m maxpipe` is the `maxpipe` command."""

from __future__ import annotations

import sys

from maxpipe.cli import main

sys.exit(main())
