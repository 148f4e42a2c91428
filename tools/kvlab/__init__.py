"""KV Cache Quantization Lab: the package behind the notebooks and the Makefile.

Called by the notebooks and by `kvlab`. Never imports torch or nbgrader: that is for the modules that need them.
"""

import sys

# jsonschema would import it to check addresses, which nobody here asks for. It builds a
# grammar at import: three seconds, half of the time in which a grading process starts.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

__version__ = "0.1.0"

FIGURES = "KVLAB_FIGURES"  # environment: off, where nobody will look at a lab's figures
