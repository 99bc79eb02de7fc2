"""Tenants of the lora plugin in `plan`: who is planned together, and what that saves."""
