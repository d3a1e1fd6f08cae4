"""Arrays and their compact forms: pure functions."""
