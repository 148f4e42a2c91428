# Run this cell first. It finds the course's package, or fetches it, and
# prints versions. It installs nothing and can be run as often as you like.
import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

REPO_URL = ""


class NotSetUp(ImportError):
    """Shown as one line instead of a traceback."""

    def _render_traceback_(self):
        return [f"Set-up: {self}"]


def find_course():
    """Puts the folder that holds kvlab on the path; fetches it when needed."""
    here = Path.cwd()
    copy = here / "kv-cache-quantization-lab"
    places = [folder / "tools" for folder in (copy, here, *here.parents)]
    tools = next((p for p in places if (p / "kvlab").is_dir()), copy / "tools")
    if not tools.is_dir():
        address = os.environ.get("KVLAB_REPO_URL", REPO_URL)
        if not address:
            raise NotSetUp(
                "the package kvlab is not here and this notebook has no address "
                "to fetch it from. Open it inside the course's folder, or put "
                "the address of the course's git repository into REPO_URL above."
            )
        half = Path(f"{copy}.part{os.getpid()}")
        clone = ["git", "clone", "--quiet", "--depth=1", address, str(half)]
        try:
            subprocess.run(clone, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise NotSetUp("git is missing; install it and run again.") from None
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().replace("\n", " ")
            raise NotSetUp(f"could not fetch {address}: {said}") from None
        half.rename(copy)
    sys.path.insert(0, str(tools))
    importlib.invalidate_caches()


if find_spec("kvlab") is None:
    find_course()

from kvlab import checks, plots, runtime

print(runtime.versions_line())
