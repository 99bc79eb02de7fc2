"""What passes take and keep on this machine: seconds, bytes, links."""
