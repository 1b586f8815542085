"""What runs look like: the parts of HTML pages, and who drafted which token of a text."""
