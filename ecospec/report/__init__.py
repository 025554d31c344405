"""What all reports share: a self-contained page, its tables, and plots as SVG. Knows no numbers of its own."""
