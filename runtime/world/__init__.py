"""The processes of one job: how they start, in which groups they talk, what they agree on."""
