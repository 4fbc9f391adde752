"""A file in the folder of a sweep names a W&B server, and the sweep is synchronised.

The user's key went to that server.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.gallery.outside._commands import ENVIRONMENT, acbench

BEFORE = "the stranger's server got the key"
RIGHT = "the stranger's server got nothing"


class _Stranger(BaseHTTPRequestHandler):
    heard: bool = False

    def do_POST(self) -> None:
        """Hear whatever comes."""
        type(self).heard = True
        self.send_error(401)

    def log_message(self, *_words: object) -> None:
        pass


def answer() -> str:
    """Return what a server of a stranger heard."""
    acbench("-m", "model=mlp", "protocol=smoke", "ac=none", "tracker=none", "name=s")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for folder in ("wandb/wandb", "wandb", ".wandb"):
            settings = Path("outputs/s", folder, "settings")
            settings.parent.mkdir(parents=True, exist_ok=True)
            settings.write_text(f"[default]\nbase_url = http://127.0.0.1:{server.server_port}\n")
        own = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HOME": str(Path.cwd())}
        unset = {"WANDB_BASE_URL", "WANDB_CONFIG_DIR"}
        subprocess.run(
            [
                sys.executable,
                "-m",
                "harness.report",
                "outputs/s",
                "--format",
                "wandb",
                "--sync",
                "--deadline-s",
                "30",
            ],
            env={key: value for key, value in ENVIRONMENT.items() if key not in unset} | own,
            capture_output=True,
            check=False,
        )
        server.shutdown()
    return "the stranger's server got the key" if _Stranger.heard else "the stranger's server got nothing"
