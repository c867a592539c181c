"""Scene, layouts, robot tables and success predicates. Torch-free."""
