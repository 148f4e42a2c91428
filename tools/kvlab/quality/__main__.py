"""`python -m kvlab.quality`: the same as `kvlab quality`.

Called by people. Holds nothing of its own.
"""

from kvlab.quality.commands import app

app()
