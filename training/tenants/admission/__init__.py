"""Which tenants train now: those admitted, those that leave, and the room that they take."""
