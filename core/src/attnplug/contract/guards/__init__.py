"""
What is compared with the agreement before plugin code runs: layers, limits, batches, calls.

Guards read attributes and CPU copies, never a device, and build messages only when something is wrong.
"""
