"""What a run met: the driver's notes on clocks and heat, and messages without names in them.

Called by `run`. Names no host, no user and no path: the files are meant to be shared.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def device_notes(device: str) -> Json:
    """Clocks, heat and load at this moment; None where nothing tells."""
    notes: Json = dict.fromkeys(
        ("temperature_c", "clock_mhz", "power_mw", "load_average_1_minute")
    )
    if device == "cuda":
        import torch

        for name, ask in (
            ("temperature_c", torch.cuda.temperature),
            ("clock_mhz", torch.cuda.clock_rate),
            ("power_mw", torch.cuda.power_draw),
        ):
            # needs the driver's own package, which need not be there
            with suppress(Exception):
                notes[name] = ask()
    with suppress(OSError, AttributeError):
        notes["load_average_1_minute"] = round(os.getloadavg()[0], 2)
    return notes


_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")
_PATH = re.compile(r"(?<![\w/:.>])(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\",;()]+[\\/]?)+")


def without_names(text: str) -> str:
    """A message without host name, user name, addresses and paths."""
    text = _PATH.sub("<path>", _URL.sub("<url>", text))
    for place in (Path.home(), Path.cwd(), Path(sys.prefix), tempfile.gettempdir()):
        if len(str(place)) > 1:
            text = text.replace(str(place), "<path>")
    with suppress(Exception):
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)
    with suppress(Exception):
        text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "<user>", text)
    return text
