"""Ways in which a resume may have gone wrong, one a file."""
