"""A stand-in for vLLM in the tests of the script that starts it: a process that listens, and one beside it.

It is started with vLLM's arguments. ``AGENTKV_STAND_IN`` says how it behaves: ``well``; ``slow``, healthy at
the third question; ``never`` healthy; ``dies`` at once; ``stubborn``, which ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_UNHEALTHY: Final = {"slow": 2, "never": 1 << 30}
"""How many questions find it unhealthy."""


class _Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        _Handler.asked += 1
        status = 503 if _Handler.asked <= _UNHEALTHY.get(os.environ["AGENTKV_STAND_IN"], 0) else 200
        self.send_response(status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main() -> None:
    """Serve until a signal comes."""
    print("stand-in started with", *sys.argv[1:], flush=True)
    behaviour = os.environ["AGENTKV_STAND_IN"]
    if behaviour == "dies":
        sys.exit("no such quantization: made-up")
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Like vLLM's engine, a process that the server's own end does not end.
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
