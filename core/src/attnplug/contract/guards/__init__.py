"""What is compared with the agreement before plugin code runs: layers, limits, batches, calls. Messages are built only when something is wrong."""
