"""The CPU's own decoder step: 8-bit weights, kernels in C++ compiled for the machine at hand."""
