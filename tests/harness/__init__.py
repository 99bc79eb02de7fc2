"""What the tests share: forges and worlds of ranks, and what each case costs. See tests/README.md."""
