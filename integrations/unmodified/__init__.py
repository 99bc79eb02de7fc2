"""What plans in loops that nobody edits share: the seam, the folder of a run, its reports, its ranks."""
