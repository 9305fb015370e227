"""Lists, tuples and dicts of small objects as columns in memory that processes share."""
