"""Its probe takes as long as it is told to."""
