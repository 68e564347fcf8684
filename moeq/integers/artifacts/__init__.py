"""What folding and the integer forward write: descriptions, programs and reports."""
