"""KV Cache Quantization Lab: the package behind the notebooks and the Makefile."""

__version__ = "0.1.0"

FIGURES = "KVLAB_FIGURES"  # environment: off, where nobody will look at a lab's figures
