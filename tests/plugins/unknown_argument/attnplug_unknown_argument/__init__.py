"""Its hook takes an argument that there is not."""
