"""Whole loaders are compared, tuned and tried, on the shell and by a call, in processes of their own."""
