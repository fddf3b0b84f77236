"""Jobs over whole files of prompts: read, run, write, and go on after whatever ended them."""
