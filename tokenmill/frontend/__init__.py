"""Front of house: words in, words out. Arguments become requests here, and tokens become result dicts."""
