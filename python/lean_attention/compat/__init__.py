"""Other libraries' functions, with their names, arguments and results."""
