"""Vision transformers in whole numbers: a program of integer operations, its simulation, its files and their replay."""
