"""Documents and pages: what commands and the web show."""
