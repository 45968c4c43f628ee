"""Talking to model servers: the one place that opens connections, retries and maps failures to errors."""

from agentkv.http.client import HttpClient, Post
from agentkv.http.options import ServerOptions, ServerSettings

__all__ = ["HttpClient", "Post", "ServerOptions", "ServerSettings"]
