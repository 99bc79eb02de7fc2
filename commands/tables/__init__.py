"""What a person sees of every verb: tables, progress, sizes and seconds with their units."""
