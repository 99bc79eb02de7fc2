"""How tenants come: their folder, their data, and whether they fit."""
