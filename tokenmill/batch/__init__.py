"""Jobs over files: read rows, run them, write results, and go on where an earlier run was ended."""
