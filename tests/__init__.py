"""The tests of agentkv; they mirror its modules."""
