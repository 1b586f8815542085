"""Input that no honest user would give, and what is then said."""
