"""Its probe takes as long as an environment variable says."""
