"""Kernels in C++ that are compiled for the processor of this machine, at the first start. Only speed depends on them."""
