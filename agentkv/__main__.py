"""``python -m agentkv`` is the ``agentkv`` command."""

from __future__ import annotations

from agentkv.cli.main import main

if __name__ == "__main__":
    main()
