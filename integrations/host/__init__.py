"""What every trainer offers to a planned step, and what hosts share: scoring, versions, tenants."""
