"""Hostile values at every border between processes: refused in one clear sentence, or harmless."""
