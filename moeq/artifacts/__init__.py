"""What stages hand to each other, as files."""
