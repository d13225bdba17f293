"""Its module ends the process."""
