"""Print, compare and describe configurations."""
