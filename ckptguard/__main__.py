"""`python -m ckptguard`: the same as the command, for whoever has only the interpreter at hand."""

from __future__ import annotations

import sys

from ckptguard.cli import main

sys.exit(main())
