"""GPU kernels, each next to its torch reference; this file exports nothing, import the module you need.

`norm`, `activation` and `rotary` choose by the device of their input; Triton is imported on first use there.
"""
