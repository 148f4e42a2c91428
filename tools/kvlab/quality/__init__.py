"""Quality against bytes: what each quantized KV cache costs a real model, at equal bytes.

Called by `make quality` (`kvlab quality`); lab 05 takes `outliers` from here. Importing it loads
neither torch nor transformers.
"""

from kvlab.quality.plan import FULL, QUICK, Plan, Workload
from kvlab.quality.run import run
from kvlab.quality.setting import Setting

__all__ = ["FULL", "QUICK", "Plan", "Setting", "Workload", "run"]
