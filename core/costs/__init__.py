"""What work costs: seconds of passes and messages, bytes that are kept, and how both follow measured steps."""
