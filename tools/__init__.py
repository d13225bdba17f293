"""Scripts of the workspace: installed nowhere."""
