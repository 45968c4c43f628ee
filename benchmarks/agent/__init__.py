"""A LangChain agent on a vLLM server: what each way to keep it informed costs, turn by turn."""
