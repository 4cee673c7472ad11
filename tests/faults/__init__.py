"""What happens to a weight sync when something dies in the middle of it: every phase, every victim.

``python -m tests.faults`` runs the whole matrix with real processes and prints the table.
"""
