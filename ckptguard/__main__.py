"""`python -m ckptguard`: the same as the command, for whoever has only the interpreter at hand."""

from __future__ import annotations

from ckptguard.cli import main

if __name__ == "__main__":
    main()
