"""Its entry_points.txt has a line without a sign."""
