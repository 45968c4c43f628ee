"""What a vLLM server gives its clients with each way to keep a model informed; see `__main__`."""
