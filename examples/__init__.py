"""Examples that run against agentkv as it is installed."""
