"""A tenant while it trains: its adapter, status, drawn samples, and the trials of its sweep."""
