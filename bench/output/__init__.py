"""What is written: rows, and the figures, tables and pictures that are made of rows alone."""
