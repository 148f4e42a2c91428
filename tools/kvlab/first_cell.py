# Run this cell first. It finds the course's package, or fetches it, and
# prints versions. It installs nothing and can be run as often as you like.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

REPO_URL = ""


class NotSetUp(ImportError):
    def _render_traceback_(self):  # one line instead of a traceback
        return [f"Set-up: {self}"]


if find_spec("kvlab") is None:
    copy = Path.cwd() / "kv-cache-quantization-lab"
    places = [folder / "tools" for folder in (copy, *copy.parents)]
    address = os.environ.get("KVLAB_REPO_URL", REPO_URL)
    if not any((place / "kvlab").is_dir() for place in places):
        if not address:
            raise NotSetUp(
                "open this notebook inside the course's folder, or put the "
                "address of the course's git repository into REPO_URL above."
            )
        half = f"{copy}.part{os.getpid()}"
        command = ["git", "clone", "--quiet", "--depth=1", address, half]
        if shutil.which("git") is None:
            raise NotSetUp("git is missing; install it and run this again.")
        quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        fetched = subprocess.run(command, capture_output=True, text=True, env=quiet)
        if fetched.returncode:
            said = fetched.stderr.strip().replace("\n", " ")
            raise NotSetUp(f"could not fetch {address}: {said}")
        os.rename(half, copy)
    tools = next(place for place in places if (place / "kvlab").is_dir())
    sys.path.insert(0, str(tools))

from kvlab import checks, plots, runtime

print(runtime.versions_line())
