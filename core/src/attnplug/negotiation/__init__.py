"""Asked against offered: verdicts, agreements, remedies, ranking, plans. Pure functions of data."""
