"""What plans in loops that nobody edits share: which loops there are, the folder of a run, its reports, its ranks."""
