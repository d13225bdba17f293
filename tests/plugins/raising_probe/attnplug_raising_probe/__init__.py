"""Its probe raises."""
