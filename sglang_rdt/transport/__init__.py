"""Moving bytes: NIXL through Ray Direct Transport."""
