"""Adapters of tenants beside a frozen model in DeepSpeed's engine, without and with pipeline stages."""
