"""One table of what is reported of a run; files, pooling, tables and glossary follow. Knows no model and no loop."""
