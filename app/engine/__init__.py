"""One llama-server: found, spelt to, started, watched and mourned."""
