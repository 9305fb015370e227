"""Services of the operating system and the interpreter that are not available everywhere.

Runs in every process; imports nothing from the rest of this package.
"""
