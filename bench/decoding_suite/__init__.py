"""What `run_decoding.py` is made of: cases, texts, runs, and what is said of them."""
