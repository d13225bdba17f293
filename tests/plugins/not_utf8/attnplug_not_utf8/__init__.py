"""Its entry_points.txt is not UTF-8."""
