"""Rows that say which of their tokens carry loss: prompts, chats, labels."""
