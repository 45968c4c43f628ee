"""A LangGraph graph whose sub-agent goes on from the prompt of its parent."""
