"""Physics engines behind one small protocol."""
