"""The paired experiment: DynamicCache against quantized caches, from workload to one JSON file.

Called by lab 06 and `kvlab matrix`. Importing it loads neither torch nor transformers.
"""

from kvlab.matrix.files import RunRefused, read
from kvlab.matrix.run import RunFailed, planned_record, run
from kvlab.matrix.workload import (
    EMBEDDED_CPU,
    PROFILES,
    Q_CUDA_MECHANISM,
    Acceptance,
    CandidateFamily,
    Workload,
    profile,
    with_model,
)

__all__ = [
    "EMBEDDED_CPU",
    "PROFILES",
    "Q_CUDA_MECHANISM",
    "Acceptance",
    "CandidateFamily",
    "RunFailed",
    "RunRefused",
    "Workload",
    "planned_record",
    "profile",
    "read",
    "run",
    "with_model",
]
