"""No rank hangs: heartbeats, who is behind, how a job ends with one message."""
