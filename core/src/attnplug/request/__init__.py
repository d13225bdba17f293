"""What is asked: requirements, device, settings. Plain data, no torch."""
