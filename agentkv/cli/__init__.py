"""The ``agentkv`` command; `agentkv.cli.main.main` is its entry."""
