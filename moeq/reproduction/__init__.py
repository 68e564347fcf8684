"""moeq reproduce: a checkpoint made again from its statement, and compared byte by byte."""
